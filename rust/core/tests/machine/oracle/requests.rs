//! What must become of each request.

use core::time::Duration;
use std::collections::BTreeSet;

use disagg_core::failure::FailureKind;
use disagg_core::ids::RequestId;
use disagg_core::time::Tick;

/// One request that the machine holds.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: RequestId,
    /// Place in the order of arrival.
    pub seq: u64,
    pub addr: String,
    pub room: u64,
    pub preset: Option<u32>,
    /// Whether it took its room; if not, it was refused at once.
    pub owns_room: bool,
    /// It has been decided: it has to be in the next step with room for it.
    pub due: bool,
    /// On the scheduler's clock.
    pub added: Duration,
    /// Most failed attempts that its end may state.
    pub ceiling: u32,
    /// What may be its end because of what happened to its peer.
    pub may_fail_with: BTreeSet<&'static str>,
    /// The only end it may have: kind, reason and status, as far as they are known.
    pub must_fail_with: Option<MustFail>,
    /// No life that began before may place it.
    pub least_life: u64,
    /// What it has been through since its peer is ready.
    pub stages: Option<Stages>,
    /// When its peer was ready for the first time.
    pub first_ready: Option<Duration>,
}

/// What a request has been through in one life of its peer.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    /// Since when, on the scheduler's clock.
    pub since: Duration,
    /// How often its room was asked for.
    pub asked: u32,
    /// Its room must not be asked for before.
    pub next_ask: Tick,
    /// How often a rank that it waits for was not found.
    pub ranks_not_found: u32,
}

/// An end that was decided already.
#[derive(Clone, Debug)]
pub struct MustFail {
    pub kind: FailureKind,
    /// A part of the reason.
    pub reason: String,
    pub status: Option<u16>,
}

impl Request {
    /// Its peer is ready from now on.
    pub fn begin_stages(&mut self, since: Duration) {
        self.stages = Some(Stages { since, ..Stages::default() });
        self.first_ready.get_or_insert(since);
    }

    pub fn may_fail_with(&mut self, kind: FailureKind) {
        self.may_fail_with.insert(kind.as_str());
    }
}
