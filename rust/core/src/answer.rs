//! What an answer to the topology query means: the table of DESIGN.md section 6.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};

use crate::failure::FailureKind;
use crate::topology::PrefillInfo;
use crate::wire::{self, TopologyBody};

/// The form of the queries that a peer understands (WIRE.md section 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// engine_rank, target_dp_group, target_pp_rank; no dp-rank routes.
    E2,
    /// prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank.
    E3,
}

impl Dialect {
    /// The path of the topology query.
    #[must_use]
    pub const fn topology_query(self) -> &'static str {
        match self {
            Self::E3 => "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
            Self::E2 => "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1",
        }
    }
}

/// Why an HTTP request got no whole answer, as the transport names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportError {
    /// Nobody listens.
    Refused,
    /// Connect or total timeout.
    Timeout,
    /// The connection was closed before an answer.
    Reset,
    /// The body ended early or was malformed.
    Cut,
    /// The body or a header is over its limit.
    Oversized,
    /// The name was not found.
    Dns,
    /// A compressed body.
    Encoding,
    /// The name resolved to an address that may not be dialled.
    Forbidden,
    /// Anything else.
    Other,
}

impl TransportError {
    /// The error of that name; unknown names are `Other`.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "refused" => Self::Refused,
            "timeout" => Self::Timeout,
            "reset" => Self::Reset,
            "cut" => Self::Cut,
            "oversized" => Self::Oversized,
            "dns" => Self::Dns,
            "encoding" => Self::Encoding,
            "forbidden" => Self::Forbidden,
            _ => Self::Other,
        }
    }
}

/// The class of an answer.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A complete topology.
    Good(Box<PrefillInfo>),
    /// Worth another attempt; `kind` is the failure's if it was the last one.
    Transient { kind: FailureKind, text: String },
    /// Another attempt now would get the same answer.
    Permanent { kind: FailureKind, text: String },
    /// 400 to the newer form: ask in the older one, within the same attempt.
    AskOlderForm,
}

impl Answer {
    /// Class of an HTTP answer to the topology query in the form `dialect`.
    pub(crate) fn of_response(
        status: u16,
        body: &[u8],
        dialect: Dialect,
        not_found_is_transient: bool,
    ) -> Self {
        let transient = |kind, text| Self::Transient { kind, text };
        let text = || format!("answered {status} to the topology query");
        match status {
            200 => Self::of_body(body),
            503 => {
                let waits = wire::parse_not_ready(body).map(|waits| format!("not ready: {waits}"));
                transient(
                    FailureKind::NotReady,
                    waits.unwrap_or_else(|| "answered 503: not ready".to_string()),
                )
            }
            400 if dialect == Dialect::E3 => Self::AskOlderForm,
            404 if not_found_is_transient => transient(FailureKind::NotReady, text()),
            429 | 500.. => transient(FailureKind::Unreachable, text()),
            413 | ..300 => transient(FailureKind::ProtocolError, text()),
            300..500 => Self::Permanent { kind: FailureKind::NotARegistry, text: text() },
        }
    }

    /// Class of an attempt that got no whole answer.
    pub(crate) fn of_error(error: TransportError, text: String) -> Self {
        let kind = match error {
            TransportError::Cut | TransportError::Oversized | TransportError::Encoding => {
                FailureKind::ProtocolError
            }
            TransportError::Refused
            | TransportError::Timeout
            | TransportError::Reset
            | TransportError::Dns
            | TransportError::Other => FailureKind::Unreachable,
            TransportError::Forbidden => {
                return Self::Permanent { kind: FailureKind::NotAllowed, text };
            }
        };
        Self::Transient { kind, text }
    }

    fn of_body(body: &[u8]) -> Self {
        match wire::parse_topology(body) {
            Ok(TopologyBody::Info(info)) => Self::Good(info),
            Ok(TopologyBody::NotReady) => Self::Transient {
                kind: FailureKind::NotReady,
                text: "answered null sizes: not ready".to_string(),
            },
            Err(error) => {
                Self::Transient { kind: FailureKind::ProtocolError, text: format!("protocol error: {error}") }
            }
        }
    }
}
