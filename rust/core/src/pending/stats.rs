//! How much is held, how old it is, and how much was done.

use core::time::Duration;

use super::Machine;
use super::peer_state::PeerState;
use super::route::CommandKind;
use crate::time::Tick;

/// How much is held, how old it is, and how much was done.
///
/// What is held is zero again when all is done; what was done only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that wait for a topology.
    pub need_info: usize,
    /// Requests that wait for their dp rank.
    pub need_dp_rank: usize,
    /// Requests that wait for endpoints.
    pub need_endpoints: usize,
    /// Requests whose end waits for a poll.
    pub decided: usize,
    /// How long the first request of `need_info`, `need_dp_rank` and `need_endpoints` has been in that stage, on the
    /// scheduler's clock; zero when there is none. For `need_info`, to which a restart leads back and which has no deadline
    /// of its own, since the request was added.
    pub oldest: [Duration; 3],
    /// Addresses: unknown, fetching, waiting, ready, marked.
    pub peers: [usize; 5],
    /// Rooms that are held.
    pub rooms: usize,
    /// Rooms that were told failed before their request came.
    pub tombstones: usize,
    /// HTTP requests in flight or on their way to the transport.
    pub in_flight: usize,
    /// HTTP requests handed out, by [`CommandKind::HTTP`].
    pub http: [u64; 4],
    /// Attempts and probes that were started; the same one in an older form counts once.
    pub attempts: u64,
    /// Attempts and probes that failed or were refused.
    pub attempts_failed: u64,
    /// Addresses given up to make room for others.
    pub evictions: u64,
}

impl Stats {
    /// HTTP requests of one kind that were handed out.
    #[must_use]
    pub fn handed_out(&self, kind: CommandKind) -> u64 {
        let place = CommandKind::HTTP.iter().position(|&other| other == kind);
        place.and_then(|place| self.http.get(place)).copied().unwrap_or_default()
    }
}

impl Machine {
    /// Counts of everything. The cost grows with the number of addresses, not of requests.
    #[must_use]
    pub fn stats(&self, now: Tick) -> Stats {
        let requests = &self.requests;
        let (asking, endpoints) =
            (requests.deadlines.need_dp_rank.len(), requests.deadlines.need_endpoints.len());
        let count = crate::ids::index;
        Stats {
            need_info: count(requests.ages.len() - asking - endpoints),
            need_dp_rank: count(asking),
            need_endpoints: count(endpoints),
            decided: requests.decided.len(),
            oldest: self.oldest(now),
            peers: self.peers_by_state(),
            rooms: requests.rooms.len(),
            tombstones: self.tombstones.len(),
            in_flight: self.flights.len(),
            http: self.counters.http,
            attempts: self.counters.attempts,
            attempts_failed: self.counters.attempts_failed,
            evictions: self.counters.evictions,
        }
    }

    fn oldest(&self, now: Tick) -> [Duration; 3] {
        let lived = self.clock.read(self.now.max(now));
        let slots = &self.requests.slots;
        // Each peer's list is in order of arrival.
        let firsts = self.peers.iter().filter_map(|(_, peer)| peer.need_info.first());
        let need_info = firsts.map(|at| slots.at(at).added).min();
        let stage = |first: Option<u32>| first.map(|at| slots.at(at).stage_since);
        let (asking, endpoints) =
            (&self.requests.deadlines.need_dp_rank, &self.requests.deadlines.need_endpoints);
        [need_info, stage(asking.first()), stage(endpoints.first())]
            .map(|since| since.map_or(Duration::ZERO, |since| lived.since(since)))
    }

    fn peers_by_state(&self) -> [usize; 5] {
        let mut peers = [0; 5];
        for (_, peer) in self.peers.iter() {
            let [unknown, fetching, waiting, ready, marked] = &mut peers;
            *match peer.state() {
                PeerState::Unknown => unknown,
                PeerState::Fetching => fetching,
                PeerState::Waiting { .. } => waiting,
                PeerState::Ready(_) => ready,
                PeerState::Marked { .. } => marked,
            } += 1;
        }
        peers
    }
}
