//! What comes out of the machine: routes, commands, events, steps.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::slots::Outcome;
use crate::ids::{RequestId, Room, RouteId, Ticket};
use crate::rank_mapping::RankMapping;
use crate::topology::PrefillInfo;

/// A prefill rank and where it listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Context-parallel rank.
    pub cp: u32,
    /// Attention TP rank.
    pub tp: u32,
    /// Pipeline stage.
    pub pp: u32,
    /// IP address or name, as the registry gave it.
    pub ip: String,
    /// Port.
    pub port: u16,
    /// Contacted, but not read.
    pub dummy: bool,
}

/// All that a receiver needs for one (peer, dp rank).
#[derive(Clone, Debug)]
pub struct Route {
    /// Tells this route from every other one of the machine.
    pub id: RouteId,
    /// Canonical bootstrap address.
    pub addr: Arc<str>,
    /// The prefill's dp rank that holds the request.
    pub dp_rank: u32,
    /// Which ranks this decode rank reads; None for a fake transfer.
    pub mapping: Option<Arc<RankMapping>>,
    /// In contact order: CP ascending, TP ascending, PP descending.
    pub endpoints: Vec<Endpoint>,
    /// The peer's topology; None for a fake transfer.
    pub info: Option<Arc<PrefillInfo>>,
    /// Which of the peer's lives, as this side counts them.
    pub epoch: u64,
    /// A warm-up transfer that never reaches the network.
    pub fake: bool,
}

/// What an HTTP request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// Read the topology.
    Topology,
    /// Ask for the dp ranks of rooms.
    DpRanks,
    /// Look up one rank's endpoint.
    Endpoint,
    /// Read the topology on a fresh connection, to see whether the peer still lives.
    Heartbeat,
    /// Abandon the request of this ticket.
    Cancel,
}

impl CommandKind {
    /// The kinds that are HTTP requests, in the order of [`super::Stats::http`].
    pub const HTTP: [Self; 4] = [Self::Topology, Self::DpRanks, Self::Endpoint, Self::Heartbeat];

    /// The name that users and the transport see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Topology => "topology",
            Self::DpRanks => "dp_ranks",
            Self::Endpoint => "endpoint",
            Self::Heartbeat => "heartbeat",
            Self::Cancel => "cancel",
        }
    }
}

/// One thing for the transport to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Give it back with the result.
    pub ticket: Ticket,
    /// What for.
    pub kind: CommandKind,
    /// Where to; empty for a cancellation.
    pub addr: Arc<str>,
    /// Path and query; empty for a cancellation.
    pub path: String,
    /// A POST's body; None is a GET.
    pub body: Option<Vec<u8>>,
    /// Most bytes of body that the answer may have.
    pub max_body: usize,
    /// How long the peer was asked to wait before it answers, on top of the total timeout; in milliseconds.
    pub wait_ms: u32,
}

/// What happened to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It is gone: its pending requests failed.
    PeerLost,
    /// It is another one now: what was cached is dropped.
    PeerRestarted,
    /// It was lost and answers again.
    PeerBack,
}

impl EventKind {
    /// All of them, in the order of [`super::PeerCounters::events`].
    pub const ALL: [Self; 3] = [Self::PeerLost, Self::PeerRestarted, Self::PeerBack];

    /// The name that users see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PeerLost => "peer_lost",
            Self::PeerRestarted => "peer_restarted",
            Self::PeerBack => "peer_back",
        }
    }
}

/// A change of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// To whom.
    pub addr: Arc<str>,
    /// The epoch that ended; for `PeerBack`, that began.
    pub epoch: u64,
    /// The instance until now, if the peer states one.
    pub old_instance: Option<Arc<str>>,
    /// The instance from now on, if known.
    pub new_instance: Option<Arc<str>>,
    /// Routed rooms concerned, when they are tracked.
    pub rooms: Vec<Room>,
}

/// What one poll took.
#[derive(Debug, Default)]
pub struct Step {
    /// Counts the steps that held something, from 1; 0 is an empty one.
    pub seq: u64,
    /// Ends in order of arrival.
    pub ended: Vec<(RequestId, Outcome)>,
    /// Changes of peers.
    pub events: Vec<Event>,
    /// Whether the limit left ends for the next poll.
    pub more: bool,
}
