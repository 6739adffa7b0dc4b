//! What was done, in numbers that only grow: facts for whoever keeps metrics.

use core::time::Duration;

use super::Machine;
use super::route::{CommandKind, EventKind};
use super::slots::{Outcome, Stage};
use crate::failure::FailureKind;

/// What was done since the machine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests that were added. Each was routed at once, is one of `requests`, or is undecided still.
    pub added: u64,
    /// Those that `add` gave a cached route.
    pub routed_at_once: u64,
    /// How requests ended.
    pub requests: RequestCounters,
    /// What was asked of peers, and what they did.
    pub peers: PeerCounters,
    /// Changes of peers that nobody took in time.
    pub changes_dropped: u64,
}

/// How requests ended, counted when it was decided, and how long they waited until then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestCounters {
    /// Warm-up transfers.
    pub fake: u64,
    /// Those that waited and got a route.
    pub resolved: u64,
    /// Those that failed, by kind.
    pub failed: ByKind,
    /// Those that were discarded before they had an end.
    pub discarded: u64,
    /// How long requests waited, by [`Wait::ALL`].
    pub waits: [Waits; 4],
}

/// What was asked of peers, and what they did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    /// HTTP requests handed out, by [`CommandKind::HTTP`].
    pub http: [u64; 4],
    /// Attempts and probes that were started; the same one in an older form counts once.
    pub attempts: u64,
    /// Attempts and probes that failed or were refused.
    pub attempts_failed: u64,
    /// Attempts and probes that were answered with a topology that fits.
    pub good: u64,
    /// Attempts and probes that failed and were worth another one, by kind.
    pub transient: ByKind,
    /// Attempts and probes that ended in a refusal, by kind.
    pub permanent: ByKind,
    /// Rooms whose dp rank was asked for; one that is asked for again counts again.
    pub rooms_asked: u64,
    /// Rooms whose dp rank an answer told, usable or not.
    pub rooms_resolved: u64,
    /// Events, by [`EventKind::ALL`].
    pub events: [u64; 3],
    /// Addresses given up to make room for others.
    pub evictions: u64,
}

/// A counter for each [`FailureKind`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByKind([u64; FailureKind::ALL.len()]);

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The topology.
    Info,
    /// Its dp rank.
    DpRank,
    /// Endpoints.
    Endpoints,
    /// Its end, over all stages.
    Total,
}

/// How long requests waited for one thing, on the scheduler's clock; what took no time is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Over all.
    pub sum: Duration,
    /// How many waited at most as long as the bound of that place, and longer than the one before; the last are those
    /// over every bound.
    pub buckets: [u64; Wait::BOUNDS.len() + 1],
}

impl Wait {
    /// All of them, in the order of [`RequestCounters::waits`].
    pub const ALL: [Self; 4] = [Self::Info, Self::DpRank, Self::Endpoints, Self::Total];

    /// The buckets' upper bounds: from one turn of a scheduler to the default `request_timeout_s`.
    pub const BOUNDS: [Duration; 15] = [
        Duration::from_millis(1),
        Duration::from_millis(5),
        Duration::from_millis(10),
        Duration::from_millis(25),
        Duration::from_millis(50),
        Duration::from_millis(100),
        Duration::from_millis(250),
        Duration::from_millis(500),
        Duration::from_secs(1),
        Duration::from_millis(2_500),
        Duration::from_secs(5),
        Duration::from_secs(10),
        Duration::from_secs(30),
        Duration::from_secs(60),
        Duration::from_secs(120),
    ];

    /// The name that users see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::DpRank => "dp_rank",
            Self::Endpoints => "endpoints",
            Self::Total => "total",
        }
    }
}

impl Waits {
    fn count(&mut self, waited: Duration) {
        if waited.is_zero() {
            return;
        }
        self.sum = self.sum.saturating_add(waited);
        let place = Wait::BOUNDS.partition_point(|bound| *bound < waited);
        if let Some(bucket) = self.buckets.get_mut(place) {
            *bucket += 1;
        }
    }
}

impl ByKind {
    pub(super) fn count(&mut self, kind: FailureKind) {
        let place = FailureKind::ALL.iter().position(|&other| other == kind);
        if let Some(count) = place.and_then(|place| self.0.get_mut(place)) {
            *count += 1;
        }
    }

    /// Each kind with its count.
    pub fn iter(&self) -> impl Iterator<Item = (FailureKind, u64)> {
        FailureKind::ALL.iter().copied().zip(self.0)
    }

    /// Over all kinds.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl RequestCounters {
    /// How a request ended.
    pub(super) fn on_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Routed(_) => self.resolved += 1,
            Outcome::Failed(failure) => self.failed.count(failure.kind),
        }
    }

    /// A request that waited is undecided no longer.
    pub(super) fn on_end(&mut self, next: &Stage, waited: Duration) {
        match next {
            Stage::Decided(outcome) => self.on_outcome(outcome),
            Stage::Free | Stage::NeedInfo | Stage::NeedDpRank(_) | Stage::NeedEndpoints(_) => {
                self.discarded += 1
            }
        }
        let [_, _, _, total] = &mut self.waits;
        total.count(waited);
    }

    /// A request's stay in `stage` is over, in whatever way.
    pub(super) fn on_stay(&mut self, stage: &Stage, stayed: Duration) {
        let [info, dp_rank, endpoints, _] = &mut self.waits;
        match stage {
            Stage::NeedInfo => info.count(stayed),
            Stage::NeedDpRank(_) => dp_rank.count(stayed),
            Stage::NeedEndpoints(_) => endpoints.count(stayed),
            Stage::Free | Stage::Decided(_) => {}
        }
    }
}

impl PeerCounters {
    /// The kinds that `transient` can hold.
    pub const TRANSIENT: [FailureKind; 3] =
        [FailureKind::Unreachable, FailureKind::NotReady, FailureKind::ProtocolError];
    /// The kinds that `permanent` can hold.
    pub const PERMANENT: [FailureKind; 3] =
        [FailureKind::NotARegistry, FailureKind::Incompatible, FailureKind::NotAllowed];

    pub(super) fn on_handed_out(&mut self, kind: CommandKind) {
        let place = CommandKind::HTTP.iter().position(|&other| other == kind);
        if let Some(count) = place.and_then(|place| self.http.get_mut(place)) {
            *count += 1;
        }
    }

    pub(super) fn on_event(&mut self, kind: EventKind) {
        let place = EventKind::ALL.iter().position(|&other| other == kind);
        if let Some(count) = place.and_then(|place| self.events.get_mut(place)) {
            *count += 1;
        }
    }
}

impl Machine {
    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let requests = (*self.requests.counters).clone();
        Counters {
            // Kept here rather than counted, as `add` with everything cached is what has to be quick.
            added: self.requests.inserted() + self.routed_at_once + requests.fake,
            routed_at_once: self.routed_at_once,
            requests,
            peers: (*self.counters).clone(),
            changes_dropped: self.changes.dropped(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_counts_in_the_first_bucket_that_is_long_enough() {
        let mut waits = Waits::default();
        for millis in [0, 1, 2, 5, 120_000, 120_001, 500_000] {
            waits.count(Duration::from_millis(millis));
        }
        assert_eq!(waits.buckets, [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(waits.sum, Duration::from_millis(740_009));
        assert!(Wait::BOUNDS.is_sorted());
    }

    #[test]
    fn each_kind_has_a_counter_of_its_own() {
        for &kind in FailureKind::ALL {
            let mut counts = ByKind::default();
            counts.count(kind);
            assert!(counts.iter().all(|(other, count)| count == u64::from(other == kind)));
            assert_eq!(counts.sum(), 1);
        }
        for (place, kind) in CommandKind::HTTP.into_iter().enumerate() {
            let mut counters = PeerCounters::default();
            counters.on_handed_out(kind);
            assert_eq!((counters.http[place], counters.http.iter().sum()), (1, 1));
        }
        for (place, kind) in EventKind::ALL.into_iter().enumerate() {
            let mut counters = PeerCounters::default();
            counters.on_event(kind);
            assert_eq!((counters.events[place], counters.events.iter().sum()), (1, 1));
        }
    }
}
