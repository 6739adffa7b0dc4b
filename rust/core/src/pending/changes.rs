//! Changes of peers that an operator wants to read of: facts that whoever keeps a log takes.
//!
//! One for each change of state of a peer, none for a request. The queue is bounded, so it costs little where nobody
//! takes them.

use alloc::collections::VecDeque;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Machine;
use super::peer_state::PeerState;
use crate::compat::{self, ReasonKind};
use crate::failure::FailureKind;
use crate::time::Tick;

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// An attempt at the topology failed, the first since the peer last answered.
    FetchFailed,
    /// As many attempts failed as the policy allows.
    BudgetSpent,
    /// The peer's answer is one that is not asked for again: no registry, or an engine that does not fit.
    Refused,
    /// The peer was ready and is gone.
    Lost,
    /// The peer is another one now.
    Restarted,
    /// The peer was lost and its topology is here again.
    Back,
    /// The peer's topology is here.
    Ready,
    /// The peer's attention TP size is another one, and keys and values are kept per head: it works, but is slow.
    UnequalTp,
}

/// A change of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// When it happened.
    pub at: Tick,
    /// What happened.
    pub kind: ChangeKind,
    /// To whom.
    pub addr: Arc<str>,
    /// Which attempt since the peer last answered, and how many there are; only of attempts that failed.
    pub attempt: Option<(u32, u32)>,
    /// What its requests fail with, if that is known.
    pub failure: Option<FailureKind>,
    /// Undecided requests that it concerned.
    pub waiting: u32,
    /// The epoch that ended or began; 0 when there was none yet.
    pub epoch: u64,
    /// Sizes of a topology: dp, cp, tp, pp.
    pub sizes: Option<[u32; 4]>,
    /// The last error, or what is wrong; may hold what a peer sent.
    pub text: String,
}

/// The changes that nobody has taken yet.
#[derive(Debug, Default)]
pub(super) struct Changes {
    queue: VecDeque<Change>,
    dropped: u64,
}

impl ChangeKind {
    /// The name that users see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FetchFailed => "fetch_failed",
            Self::BudgetSpent => "budget_spent",
            Self::Refused => "refused",
            Self::Lost => "lost",
            Self::Restarted => "restarted",
            Self::Back => "back",
            Self::Ready => "ready",
            Self::UnequalTp => "unequal_tp",
        }
    }
}

impl Changes {
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The newest changes say most.
    fn push(&mut self, change: Change) {
        if self.queue.len() >= MAX_CHANGES {
            self.queue.pop_front();
            self.dropped += 1;
        }
        self.queue.push_back(change);
    }
}

impl Machine {
    /// The oldest changes that were not taken yet, at most `limit`.
    #[must_use]
    pub fn poll_changes(&mut self, limit: usize) -> Vec<Change> {
        let most = limit.min(self.changes.queue.len());
        self.changes.queue.drain(..most).collect()
    }

    /// An attempt failed for the first time, or for the last.
    pub(super) fn note_attempt(&mut self, at: u32, kind: ChangeKind) {
        let (error, failed) = {
            let budget = &self.peers.at(at).budget;
            (budget.last_error.clone(), budget.failed)
        };
        let (failure, text) = error.unzip();
        let attempt = Some((failed, self.policy.max_attempts));
        self.note(at, Change { attempt, failure, ..change(kind, text.unwrap_or_default()) });
    }

    /// The peer is refused; a probe that only finds it so again changes nothing.
    pub(super) fn note_refused(&mut self, at: u32, failure: FailureKind, text: &str) {
        if let PeerState::Marked { failure: mark, .. } = self.peers.at(at).state()
            && mark.kind == failure
        {
            return;
        }
        self.note(at, Change { failure: Some(failure), ..change(ChangeKind::Refused, text.to_string()) });
    }

    pub(super) fn note_lost(&mut self, at: u32, text: &str) {
        let failure = Some(FailureKind::PeerLost);
        self.note(at, Change { failure, ..change(ChangeKind::Lost, text.to_string()) });
    }

    pub(super) fn note_restarted(&mut self, at: u32) {
        self.note(at, change(ChangeKind::Restarted, String::new()));
    }

    /// The peer's topology is here; the first time also what is slow with it.
    pub(super) fn note_ready(&mut self, at: u32, is_back: bool) {
        let peer = self.peers.at_mut(at);
        let Some(info) = peer.ready().map(|ready| Arc::clone(&ready.info)) else {
            return;
        };
        let is_first = !core::mem::replace(&mut peer.was_ready, true);
        let spec = info.spec();
        let sizes = Some([spec.dp_size, spec.attn_cp_size, spec.attn_tp_size, spec.pp_size]);
        let kind = if is_back { ChangeKind::Back } else { ChangeKind::Ready };
        self.note(at, Change { sizes, ..change(kind, String::new()) });
        if !is_first {
            return;
        }
        let reasons = compat::check(&self.decode, &info);
        if let Some(reason) = reasons.iter().find(|reason| reason.kind == ReasonKind::UnequalTp) {
            self.note(at, Change { sizes, ..change(ChangeKind::UnequalTp, reason.to_string()) });
        }
    }

    fn note(&mut self, at: u32, change: Change) {
        let peer = self.peers.at(at);
        let (addr, waiting, epoch) = (Arc::clone(&peer.addr), peer.pending, peer.epoch);
        self.changes.push(Change { at: self.now, addr, waiting, epoch, ..change });
    }
}

/// A change without what [`Machine::note`] fills in.
fn change(kind: ChangeKind, text: String) -> Change {
    Change {
        at: Tick::ZERO,
        kind,
        addr: Arc::from(""),
        attempt: None,
        failure: None,
        waiting: 0,
        epoch: 0,
        sizes: None,
        text,
    }
}

/// Five seconds of what a log of 100 lines a second takes.
const MAX_CHANGES: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_change_gives_way_and_is_counted() {
        let mut changes = Changes::default();
        for epoch in 0..515 {
            changes.push(Change { epoch, ..change(ChangeKind::Ready, String::new()) });
        }
        assert_eq!((changes.dropped(), changes.queue.len()), (3, MAX_CHANGES));
        assert_eq!(changes.queue.front().map(|change| change.epoch), Some(3));
    }
}
