//! The states of an address, what happens to it, and the one function that leads from one to the next.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::peer::Ready;
use crate::failure::Failure;
use crate::time::Tick;

/// The states of an address.
///
/// ```text
///             AttemptStarts           AttemptFailed            AttemptStarts (due, or polled)
///   Unknown ────────────────► Fetching ───────────► Waiting ──────────────────► Fetching
///    │ ▲ │ ▲                     │                   │ ▲ │ NobodyWaits: Unknown
///    │ │ │ └── Dropped, from     │ Answered          │ │ │ GivenUp (spent, nobody waits)
///    │ │ │     each state        ▼                   │ │ ▼
///    │ │ └── Answered ────────► Ready ◄── Answered ──┼─┼ Marked ── ProbeFailed: Marked
///    │ │                                             │ │   ▲
///    │ └─────────────────────────────────────────────┘ │   │
///    ├── Rests (restarted again within `interval_s`) ──┘   │
///    └── Refused (permanent, incompatible, lost) ──────────┘
/// ```
///
/// What ends an epoch (restarted, refused, lost, forgotten) is `Dropped` first, and then goes on from Unknown.
///
/// Every state is left in time: Fetching by the transport's total timeout, Waiting and Marked at `until`, Unknown
/// and Ready when no request came for `peer_ttl_s` (the address is forgotten), which ends the probes too.
#[derive(Debug)]
pub(super) enum PeerState {
    /// Nothing is known and nobody asks.
    Unknown,
    /// An attempt is in flight.
    Fetching,
    /// Between two attempts.
    Waiting { until: Tick, for_poll: bool },
    /// Its topology is cached.
    Ready(Box<Ready>),
    /// Refused or down: newcomers fail with this at once; a probe goes out at `until`.
    Marked { failure: Arc<Failure>, until: Tick },
}

/// What happens to an address.
#[derive(Debug)]
pub(super) enum PeerEvent {
    /// Its topology is asked for, because a request waits.
    AttemptStarts,
    /// The attempt failed; the next one is due at `until`, or with the next poll.
    AttemptFailed { until: Tick, for_poll: bool },
    /// A complete topology that fits is here.
    Answered(Box<Ready>),
    /// A pause is over, and nobody waits any more.
    NobodyWaits,
    /// The budget is spent and nobody waits.
    GivenUp { failure: Arc<Failure>, until: Tick },
    /// It was refused for good, or is gone.
    Refused { failure: Arc<Failure>, until: Tick },
    /// It is still not back.
    ProbeFailed { failure: Arc<Failure>, until: Tick },
    /// What was known of it holds no more.
    Dropped,
    /// It restarted a moment after the last time, and is not asked before `until`.
    Rests { until: Tick },
}

impl PeerState {
    /// The state after `event`: the one transition function.
    pub fn after(&self, event: PeerEvent) -> Self {
        use PeerEvent as E;
        match (self, event) {
            (Self::Unknown | Self::Waiting { .. }, E::AttemptStarts) => Self::Fetching,
            (Self::Fetching, E::AttemptFailed { until, for_poll }) => Self::Waiting { until, for_poll },
            (Self::Unknown, E::Rests { until }) => Self::Waiting { until, for_poll: false },
            (Self::Unknown | Self::Fetching | Self::Marked { .. }, E::Answered(ready)) => Self::Ready(ready),
            (Self::Waiting { .. }, E::GivenUp { failure, until })
            | (Self::Unknown, E::Refused { failure, until })
            | (Self::Marked { .. }, E::ProbeFailed { failure, until }) => Self::Marked { failure, until },
            (Self::Waiting { .. }, E::NobodyWaits)
            | (
                Self::Unknown | Self::Fetching | Self::Waiting { .. } | Self::Ready(_) | Self::Marked { .. },
                E::Dropped,
            ) => Self::Unknown,
            (
                state @ (Self::Unknown
                | Self::Fetching
                | Self::Waiting { .. }
                | Self::Ready(_)
                | Self::Marked { .. }),
                event @ (E::AttemptStarts
                | E::AttemptFailed { .. }
                | E::Answered(_)
                | E::NobodyWaits
                | E::GivenUp { .. }
                | E::Refused { .. }
                | E::ProbeFailed { .. }
                | E::Rests { .. }),
            ) => unreachable!("{event:?} cannot happen to a peer that is {state:?}"),
        }
    }
}
