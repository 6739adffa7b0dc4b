//! What each peer must be, from what it answered and what was told of it.

use std::collections::BTreeMap;

use disagg_core::failure::FailureKind;
use disagg_core::retry::{RetryPolicy, seconds};
use disagg_core::time::Tick;
use disagg_core::{ids::Ticket, pending::CommandKind};

/// One address that the machine has to know.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Its topology is known: which life, and what it is.
    pub ready: Option<Ready>,
    /// Attempts that failed since it last answered or was told restarted; at least the machine's count.
    pub failed: u32,
    /// What it was refused for, if it did not answer since.
    pub refused: Option<FailureKind>,
    /// Lost, and not back yet.
    pub lost: bool,
    pub last_add: Tick,
    /// Which meeting this is, over all addresses.
    pub met: u64,
    /// The next attempt must not start before.
    pub not_before: Tick,
    /// An attempt failed and no poll came since.
    pub failed_since_poll: bool,
    /// It restarted: the older form of the query may follow, as part of the attempt that started then.
    pub older_form: Option<Tick>,
    /// Restarts before this instant are followed by a rest.
    pub rest_until: Tick,
    /// 404 answers to look-ups.
    pub ranks_not_found: u32,
    /// Paths that failed, and when they may be asked for again in this life.
    pub paced: BTreeMap<String, Tick>,
}

/// A ready peer.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Unique over all peers, and ascending.
    pub life: u64,
    pub topology: usize,
    pub instance: Option<&'static str>,
    pub missed: u32,
    pub missed_since: Tick,
}

/// One HTTP request in flight.
#[derive(Clone, Debug)]
pub struct Flight {
    pub ticket: Ticket,
    pub kind: CommandKind,
    pub addr: String,
    pub path: String,
    pub rooms: Vec<u64>,
    /// When the attempt or the request started.
    pub started: Tick,
    /// The life in which it was asked; None is an attempt or a probe.
    pub life: Option<u64>,
}

impl Flight {
    pub fn is_older_form(&self) -> bool {
        self.path.contains("engine_rank")
    }

    /// Whether it asks for a cached endpoint once more.
    pub fn is_check(&self) -> bool {
        self.kind == CommandKind::Heartbeat && !self.path.contains("=-1")
    }

    /// Whether a look-up is of this dp rank.
    pub fn is_of_dp_rank(&self, dp_rank: u32) -> bool {
        self.path.contains(&format!("prefill_dp_rank={dp_rank}&"))
            || self.path.contains(&format!("target_dp_group={dp_rank}&"))
    }
}

impl Peer {
    pub fn new(now: Tick, met: u64) -> Self {
        Self { last_add: now, met, ..Self::default() }
    }

    /// An attempt or a probe that started at `started` failed, for now.
    pub fn attempt_failed(&mut self, policy: &RetryPolicy, started: Tick) {
        self.failed += 1;
        self.failed_since_poll = true;
        self.older_form = None;
        let least = policy.interval_s.min(policy.max_interval_s) * (1.0 - policy.jitter);
        self.not_before = started.after(seconds(least));
    }

    /// It answered that it never will do.
    pub fn refuse(&mut self, policy: &RetryPolicy, kind: FailureKind, now: Tick) {
        self.end_life();
        self.failed += 1;
        self.refused = Some(kind);
        self.not_before = now.after(seconds(policy.cooldown_s));
    }

    pub fn become_ready(&mut self, life: u64, topology: usize, instance: Option<&'static str>) {
        self.end_life();
        self.failed = 0;
        self.refused = None;
        self.lost = false;
        self.ready = Some(Ready { life, topology, instance, missed: 0, missed_since: Tick::ZERO });
    }

    pub fn lose(&mut self, policy: &RetryPolicy, now: Tick) {
        self.end_life();
        self.lost = true;
        self.not_before = now.after(seconds(policy.cooldown_s));
    }

    /// It is another one now, as somebody said.
    pub fn start_over(&mut self) {
        self.end_life();
        self.failed = 0;
        self.refused = None;
    }

    /// Whether a peer that answered that it is another one has to rest; then it is not asked before.
    pub fn rests_after_restart(&mut self, policy: &RetryPolicy, now: Tick) -> bool {
        let until = self.rest_until;
        self.rest_until = until.max(now).after(seconds(policy.interval_s));
        if until > now {
            self.not_before = until;
        }
        until > now
    }

    fn end_life(&mut self) {
        self.ready = None;
        self.older_form = None;
        self.not_before = Tick::ZERO;
        self.failed_since_poll = false;
        self.paced.clear();
    }
}
