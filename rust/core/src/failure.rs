//! Why a request was not placed: the one table of kinds and HTTP statuses.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

macro_rules! failure_kinds {
    ($($(#[$doc:meta])* $name:ident, $text:literal, $status:literal;)*) => {
        /// What went wrong; each kind suggests an HTTP status.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum FailureKind { $($(#[$doc])* $name,)* }

        impl FailureKind {
            /// Every kind, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The name that users see.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The HTTP status that a client should be answered with.
            #[must_use]
            pub const fn http_status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }
        }
    };
}

failure_kinds! {
    /// Nothing answered at the address, or only errors, until the budget was spent.
    Unreachable, "unreachable", 503;
    /// The peer said that it is not ready until the budget was spent.
    NotReady, "not_ready", 503;
    /// The peer was ready and is gone.
    PeerLost, "peer_lost", 503;
    /// The peer failed before and did not answer since.
    Cooldown, "cooldown", 503;
    /// The resolver was closed.
    Closed, "closed", 503;
    /// The peer answers, but not in the protocol.
    ProtocolError, "protocol_error", 502;
    /// The address answers, but is no prefill's bootstrap server.
    NotARegistry, "not_a_registry", 502;
    /// The dp rank is not below the peer's dp size; 400 when the request had preset it.
    DpRankOutOfRange, "dp_rank_out_of_range", 502;
    /// The two engines do not fit.
    Incompatible, "incompatible", 409;
    /// Another pending request has the room.
    DuplicateRoom, "duplicate_room", 409;
    /// The address is not on the list of allowed ones.
    NotAllowed, "not_allowed", 403;
    /// The limit of distinct addresses is reached.
    TooManyAddresses, "too_many_addresses", 429;
    /// The peer did not tell the room's dp rank in time.
    DpRankTimeout, "dp_rank_timeout", 504;
    /// The ranks' endpoints could not be read in time.
    EndpointTimeout, "endpoint_timeout", 504;
    /// The request was not placed in time over all stages.
    RequestTimeout, "request_timeout", 504;
    /// A rank of a complete topology has no endpoint.
    RankMissing, "rank_missing", 502;
    /// The engine said so; the status is the engine's.
    Told, "told", 500;
    /// A fault of this library.
    Internal, "internal", 500;
}

/// Coordinates of a prefill rank: dp, cp, tp, pp.
pub type Coordinates = (u32, u32, u32, u32);

/// Why a request was not placed; shared by all requests that one event concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub kind: FailureKind,
    /// A sentence for a person, with the address and the last error.
    pub reason: String,
    /// What to answer the client with.
    pub http_status: u16,
    /// The bootstrap address.
    pub addr: Arc<str>,
    /// How many attempts at the topology had failed.
    pub attempts: u32,
    /// The prefill ranks whose endpoints had been read, in contact order.
    pub contacted: Vec<Coordinates>,
}
