//! What a request or a peer waits for, in a sentence for people.

use alloc::format;
use alloc::string::{String, ToString};

use super::add::AddError;
use super::peer::{GroupState, Peer, Ready};
use super::peer_state::PeerState;
use super::slots::{Outcome, Slot, Stage};
use super::{Machine, and_last_error};
use crate::ids::RequestId;
use crate::printable::Printable;
use crate::time::Tick;

impl Machine {
    /// What a request that is held waits for, where, since when and until when; None when it is not held.
    ///
    /// Ages are on the scheduler's clock, as the deadlines are.
    #[must_use]
    pub fn explain(&self, now: Tick, id: RequestId) -> Option<String> {
        let slot = self.requests.slots.find(id)?;
        let lived = self.clock.read(self.now.max(now));
        let since = |from: Tick, of: f64| format!("{:.1} s of {of} s", lived.since(from).as_secs_f64());
        let text = match &slot.stage {
            Stage::Free => return None,
            Stage::Decided(outcome) => return Some(outcome.explain()),
            Stage::NeedInfo => {
                let peer = self.peers.at(slot.peer);
                let waited = since(slot.added, self.options.request_timeout_s);
                format!("waiting for the topology of {}, {waited}: {}", peer.addr, self.progress(peer, now))
            }
            Stage::NeedDpRank(_) => {
                let waited = since(slot.stage_since, self.options.dp_rank_timeout_s);
                self.explain_dp_rank(slot, &waited)
            }
            &Stage::NeedEndpoints(dp_rank) => {
                let waited = since(slot.stage_since, self.options.endpoint_timeout_s);
                self.explain_endpoints(slot, dp_rank, &waited)
            }
        };
        Some(Printable(text).to_string())
    }

    /// What is known of an address and what happens next; None when it is not known.
    ///
    /// # Errors
    /// A malformed address.
    pub fn explain_peer(&self, now: Tick, address: &str) -> Result<Option<String>, AddError> {
        let Some(at) = self.find_spelled(address)? else {
            return Ok(None);
        };
        let peer = self.peers.at(at);
        let wait = match peer.pending {
            0 => String::from("no request waits"),
            1 => String::from("1 request waits"),
            many => format!("{many} requests wait"),
        };
        let text = format!("{}: {}; {wait}", peer.addr, self.progress(peer, now));
        Ok(Some(Printable(text).to_string()))
    }

    fn explain_dp_rank(&self, slot: &Slot, waited: &str) -> String {
        let peer = self.peers.at(slot.peer);
        let asked = match slot.asked {
            0 => String::from("not asked yet"),
            1 => String::from("asked once"),
            many => format!("asked {many} times"),
        };
        let error = peer.ready().map_or("", |ready| &ready.query.error);
        let (room, addr, error) = (slot.room, &peer.addr, and_last_error(error));
        format!("waiting for the dp rank of room {room} at {addr}, {asked}, {waited}{error}")
    }

    fn explain_endpoints(&self, slot: &Slot, dp_rank: u32, waited: &str) -> String {
        let peer = self.peers.at(slot.peer);
        let Some(group) = peer.ready().and_then(|ready| ready.groups.get(&dp_rank)) else {
            unreachable!("a group is not removed while requests wait for it")
        };
        let (read, all) = (group.found.iter().flatten().count(), group.found.len());
        let reading = match group.state {
            GroupState::Reading { .. } => ", the topology is read again",
            GroupState::Looking | GroupState::Waiting { .. } | GroupState::Ready(_) => "",
        };
        let error = and_last_error(&group.last_error);
        let addr = &peer.addr;
        format!(
            "waiting for the endpoints of dp rank {dp_rank} at {addr}, {read} of {all} read{reading}, {waited}{error}"
        )
    }

    /// How far the peer is: its last error, and what comes next.
    fn progress(&self, peer: &Peer, now: Tick) -> String {
        let now = self.now.max(now);
        let inside = |at: Tick| format!("in {:.1} s", at.since(now).as_secs_f64());
        let text = match peer.state() {
            PeerState::Unknown => String::from("nothing is known of it, nobody asks"),
            PeerState::Fetching => format!("{} is under way", self.next_attempt(peer)),
            PeerState::Waiting { for_poll: true, .. } => {
                format!("{} goes out with the next poll", self.next_attempt(peer))
            }
            PeerState::Waiting { until, for_poll: false } => {
                format!("{} {}", self.next_attempt(peer), inside(*until))
            }
            PeerState::Ready(ready) => return ready_text(peer, ready),
            PeerState::Marked { failure, until } => {
                let probe = if peer.fetch.is_some() { String::from("under way") } else { inside(*until) };
                let reason = failure.reason.strip_prefix(&format!("{}: ", peer.addr));
                return format!("{}; probe {probe}", reason.unwrap_or(&failure.reason));
            }
        };
        match &peer.budget.last_error {
            Some((_, error)) => format!("{error}; {text}"),
            None => text,
        }
    }

    fn next_attempt(&self, peer: &Peer) -> String {
        let (next, most) = (peer.budget.failed + 1, self.policy.max_attempts);
        format!("attempt {next} of {most}")
    }
}

impl Outcome {
    /// What became of a request to which a poll has not given this yet.
    #[must_use]
    pub fn explain(&self) -> String {
        let text = match self {
            Self::Routed(route) => {
                format!("routed to dp rank {} at {}; the next poll gives it", route.dp_rank, route.addr)
            }
            Self::Failed(failure) => {
                format!("failed ({}): {}; the next poll gives it", failure.kind.as_str(), failure.reason)
            }
        };
        Printable(text).to_string()
    }
}

fn ready_text(peer: &Peer, ready: &Ready) -> String {
    let info = &ready.info;
    let (tp, cp) = (info.attn_tp_size(), info.attn_cp_size());
    let (pp, dp) = (info.pp_size(), info.dp_size());
    let missed = match ready.read.missed {
        0 => String::new(),
        missed => format!(", {missed} looks at it in a row failed"),
    };
    format!("ready, epoch {}, tp {tp} x cp {cp} x pp {pp} x dp {dp}{missed}", peer.epoch)
}
