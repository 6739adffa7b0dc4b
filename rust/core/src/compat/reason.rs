//! A difference of a pair as data: what differs, how bad it is, both values; the sentence is built when it is read.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde_json::Value;

use super::MAX_CONTACTS;
use crate::printable::Printable;

/// Whether a difference refuses the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// The pair cannot work.
    Fatal,
    /// The pair works, or may; an operator should know.
    Warning,
}

impl Severity {
    /// The public name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fatal => "fatal",
            Self::Warning => "warning",
        }
    }
}

macro_rules! reason_kinds {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// What differs, or which rule the pair breaks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ReasonKind { $($(#[doc = $doc])+ $variant,)+ }

        impl ReasonKind {
            /// Every kind, in the order in which [`check`](super::check) reports.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The public name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

reason_kinds! {
    /// Tokens in a page.
    PageSize = "page_size",
    /// Element types; `auto` against a concrete one is a warning unless `strict_dtype`.
    KvCacheDtype = "kv_cache_dtype",
    /// Memory layouts.
    KvLayout = "kv_layout",
    /// Allocation policies.
    DecodeAllocationPolicy = "decode_allocation_policy",
    /// Layouts of speculative decoding.
    SpecLayout = "spec_layout",
    /// Policy `prefill_complete` with a peer of more than one TP, CP or PP rank.
    PrefillComplete = "prefill_complete",
    /// This cache needs equal TP sizes.
    EqualTp = "equal_tp",
    /// Sharded MLA needs equal TP sizes.
    ShardingTp = "sharding_tp",
    /// Neither TP size divides the other.
    TpDivisibility = "tp_divisibility",
    /// A warning: per-head caches with unequal TP are slow.
    UnequalTp = "unequal_tp",
    /// The heads cannot be dealt out evenly on both sides.
    NumKvHeads = "num_kv_heads",
    /// Decode CP above 1.
    DecodeCp = "decode_cp",
    /// Stages that do not line up.
    PpSize = "pp_size",
    /// Decode-context parallelism with a per-head cache.
    DcpKv = "dcp_kv",
    /// Decode-context parallelism with prefill CP above 1.
    DcpPrefillCp = "dcp_prefill_cp",
    /// Decode-context parallelism with sharding.
    DcpSharding = "dcp_sharding",
    /// One decode rank would contact more than [`MAX_CONTACTS`](super::MAX_CONTACTS) prefill ranks.
    Contacts = "contacts",
}

/// One side's value in a [`Reason`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Side {
    /// Not stated, or the rule has no value on this side.
    Absent,
    /// A size or count.
    Number(u64),
    /// A switch.
    Switch(bool),
    /// A name.
    Text(String),
    /// A JSON object.
    Json(Value),
    /// All KV heads of the model over one side's TP ranks.
    Heads {
        /// KV heads of the model.
        heads: u32,
        /// TP size.
        tp: u32,
    },
    /// A peer's sizes.
    Sizes {
        /// TP size.
        tp: u32,
        /// CP size.
        cp: u32,
        /// Stages.
        pp: u32,
    },
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("none"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Switch(on) => f.write_str(if *on { "on" } else { "off" }),
            Self::Text(text) => write!(f, "{}", Printable(text)),
            Self::Json(value) => write!(f, "{}", Printable(value)),
            Self::Heads { heads, tp } => write!(f, "{heads} over tp {tp}"),
            Self::Sizes { tp, cp, pp } => write!(f, "tp {tp} cp {cp} pp {pp}"),
        }
    }
}

/// One difference of a pair, with both values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// What differs.
    pub kind: ReasonKind,
    /// Whether it refuses the peer.
    pub severity: Severity,
    /// The decode side's value.
    pub local: Side,
    /// The prefill side's value.
    pub remote: Side,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (local, remote) = (&self.local, &self.remote);
        match self.kind {
            ReasonKind::PageSize
            | ReasonKind::KvCacheDtype
            | ReasonKind::KvLayout
            | ReasonKind::DecodeAllocationPolicy
            | ReasonKind::SpecLayout => {
                let name = self.kind.name();
                write!(f, "{name} {local} here, {remote} at the prefill: must be equal")
            }
            ReasonKind::PrefillComplete => {
                write!(f, "prefill {remote}: policy prefill_complete needs tp, cp and pp 1")
            }
            ReasonKind::EqualTp => {
                write!(f, "decode tp {local}, prefill tp {remote}: this cache needs equal tp")
            }
            ReasonKind::ShardingTp => {
                write!(f, "decode tp {local}, prefill tp {remote}: sharded mla needs equal tp")
            }
            ReasonKind::TpDivisibility => self.fmt_divisibility(f),
            ReasonKind::UnequalTp => {
                write!(f, "decode tp {local}, prefill tp {remote}: slow when unequal and kv is mha")
            }
            ReasonKind::NumKvHeads => {
                write!(f, "num_kv_heads {local} here, {remote} at the prefill: one must divide the other")
            }
            ReasonKind::DecodeCp => write!(f, "decode cp {local}: must be 1"),
            ReasonKind::PpSize => {
                write!(f, "decode pp {local}, prefill pp {remote}: must be equal, or 1 at the decode")
            }
            ReasonKind::DcpKv => write!(f, "dcp_size {local}: needs kv mla or hybrid_mla, not mha"),
            ReasonKind::DcpPrefillCp => {
                write!(f, "dcp_size {local}, prefill cp {remote}: dcp needs prefill cp 1")
            }
            ReasonKind::DcpSharding => {
                write!(f, "dcp_size {local}, prefill sharding {remote}: dcp needs it off")
            }
            ReasonKind::Contacts => {
                write!(f, "{remote} contacts of one decode rank: must be at most {MAX_CONTACTS}")
            }
        }
    }
}

impl Reason {
    fn fmt_divisibility(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (local, remote) = (&self.local, &self.remote);
        match (local, remote) {
            (Side::Number(ours), Side::Number(theirs)) if ours < theirs => {
                write!(f, "decode tp {local} does not divide prefill tp {remote}")
            }
            _ => write!(f, "prefill tp {remote} does not divide decode tp {local}"),
        }
    }
}

/// All differences of a pair, at least one of them fatal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incompatible {
    /// In the order of [`ReasonKind::ALL`], warnings too.
    pub reasons: Vec<Reason>,
}

impl core::error::Error for Incompatible {}

impl fmt::Display for Incompatible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, reason) in self.reasons.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{reason}")?;
        }
        Ok(())
    }
}
