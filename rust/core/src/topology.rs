//! What each side of a pair is: one decode rank, and one prefill engine as its registry describes it.
//!
//! Both are checked when they are built and never again: a [`DecodeRank`] or [`PrefillInfo`] in hand has sizes from 1 to
//! [`MAX_SIZE`] whose product is at most [`MAX_RANKS`].

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};

use serde_json::Value;

use crate::error::InvalidValue;

mod kv_kind;

pub use kv_kind::KvKind;

/// What a [`DecodeRank`] is built from; the fields are DESIGN.md section 4's, `None` is "not stated".
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DecodeRankSpec {
    /// Attention-TP size of the decode engine.
    pub attn_tp_size: u32,
    /// TP rank in the engine; the attention-TP rank is this modulo `attn_tp_size`.
    pub engine_rank: u32,
    /// Attention-CP size; anything but 1 is incompatible with every peer for now.
    pub attn_cp_size: u32,
    /// Attention-CP rank, below `attn_cp_size`.
    pub attn_cp_rank: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// This rank's stage, below `pp_size`.
    pub pp_rank: u32,
    /// What the cache is made of.
    pub kv: KvKind,
    /// Read from all prefill CP ranks; `None` is automatic: only for `hybrid_mla`.
    pub all_cp_ranks: Option<bool>,
    /// Total KV heads of the model, never local heads times TP.
    pub num_kv_heads: Option<u32>,
    /// Tokens in a KV page.
    pub page_size: Option<u32>,
    /// Element type of the KV cache, or `auto`.
    pub kv_cache_dtype: Option<String>,
    /// Name of the memory layout.
    pub kv_layout: Option<String>,
    /// When the decode side allocates: `early` or `prefill_complete`.
    pub decode_allocation_policy: Option<String>,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Layout of speculative decoding, an object; not stated differs from stated.
    pub spec_layout: Option<Value>,
    /// The cache cannot be re-sliced: refuse any other TP size.
    pub requires_equal_tp: bool,
    /// `auto` against a concrete dtype refuses the peer instead of warning.
    pub strict_dtype: bool,
}

impl Default for DecodeRankSpec {
    fn default() -> Self {
        Self {
            attn_tp_size: 1,
            engine_rank: 0,
            attn_cp_size: 1,
            attn_cp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            kv: KvKind::Mha,
            all_cp_ranks: None,
            num_kv_heads: None,
            page_size: Some(64),
            kv_cache_dtype: Some("auto".to_string()),
            kv_layout: None,
            decode_allocation_policy: None,
            dcp_size: 1,
            spec_layout: None,
            requires_equal_tp: false,
            strict_dtype: false,
        }
    }
}

/// One rank of a decode engine, checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DecodeRank {
    spec: DecodeRankSpec,
}

impl DecodeRank {
    /// Checks the sizes and ranks.
    ///
    /// # Errors
    /// The first value that breaks its rule: sizes 1 to [`MAX_SIZE`], their product at most [`MAX_RANKS`], ranks below
    /// their sizes, `page_size` and `num_kv_heads` at least 1.
    pub fn new(spec: DecodeRankSpec) -> Result<Self, InvalidValue> {
        check_size("attn_tp_size", spec.attn_tp_size)?;
        check_size("attn_cp_size", spec.attn_cp_size)?;
        check_size("pp_size", spec.pp_size)?;
        check_size("dcp_size", spec.dcp_size)?;
        check_product(&[spec.attn_tp_size, spec.attn_cp_size, spec.pp_size])?;
        check_rank("attn_cp_rank", spec.attn_cp_rank, "attn_cp_size", spec.attn_cp_size)?;
        check_rank("pp_rank", spec.pp_rank, "pp_size", spec.pp_size)?;
        check_positive("page_size", spec.page_size)?;
        check_positive("num_kv_heads", spec.num_kv_heads)?;
        Ok(Self { spec })
    }

    /// What it was built from.
    #[must_use]
    pub const fn spec(&self) -> &DecodeRankSpec {
        &self.spec
    }

    /// Attention-TP size of the decode engine.
    #[must_use]
    pub const fn attn_tp_size(&self) -> u32 {
        self.spec.attn_tp_size
    }

    /// The rank within the attention-TP group.
    #[must_use]
    pub const fn attn_tp_rank(&self) -> u32 {
        self.spec.engine_rank % self.spec.attn_tp_size
    }

    /// What the cache is made of.
    #[must_use]
    pub const fn kv(&self) -> KvKind {
        self.spec.kv
    }

    /// Whether this rank asks for all prefill CP ranks; `None` in the specification means only for `hybrid_mla`.
    #[must_use]
    pub fn pulls_all_cp_ranks(&self) -> bool {
        self.spec.all_cp_ranks.unwrap_or(matches!(self.spec.kv, KvKind::HybridMla))
    }
}

/// What a [`PrefillInfo`] is built from; the fields are DESIGN.md section 4's, `None` is "unknown".
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefillInfoSpec {
    /// Attention-TP size of the prefill engine.
    pub attn_tp_size: u32,
    /// Attention-CP size.
    pub attn_cp_size: u32,
    /// Data-parallel groups.
    pub dp_size: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Tokens in a KV page.
    pub page_size: Option<u32>,
    /// Element type of the KV cache, or `auto`.
    pub kv_cache_dtype: Option<String>,
    /// A room's dp rank is the room modulo `dp_size`.
    pub follow_bootstrap_room: bool,
    /// CP ranks own layers: all of them must be read.
    pub enable_dsa_cache_layer_split: bool,
    /// Each rank owns a subset of the pages: all of them must be read.
    pub enable_kv_cache_sharding: bool,
    /// Port of the prefill's own API.
    pub prefill_http_port: Option<u16>,
    /// Name of the memory layout.
    pub kv_layout: Option<String>,
    /// When the decode side allocates: `early` or `prefill_complete`.
    pub decode_allocation_policy: Option<String>,
    /// `dp_size` may change while the engine lives: the room rule does not hold.
    pub dynamic_dp_size: bool,
    /// Layout of speculative decoding, an object.
    pub spec_layout: Option<Value>,
    /// Keys of the topology answer that this version does not know, as they came.
    pub extras: BTreeMap<String, Value>,
}

impl Default for PrefillInfoSpec {
    fn default() -> Self {
        Self {
            attn_tp_size: 1,
            attn_cp_size: 1,
            dp_size: 1,
            pp_size: 1,
            page_size: Some(64),
            kv_cache_dtype: Some("auto".to_string()),
            follow_bootstrap_room: true,
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            prefill_http_port: None,
            kv_layout: None,
            decode_allocation_policy: Some(EARLY.to_string()),
            dynamic_dp_size: false,
            spec_layout: None,
            extras: BTreeMap::new(),
        }
    }
}

/// One prefill engine as its registry describes it, checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefillInfo {
    spec: PrefillInfoSpec,
}

impl PrefillInfo {
    /// Checks the sizes.
    ///
    /// # Errors
    /// The first value that breaks its rule: sizes 1 to [`MAX_SIZE`], their product at most [`MAX_RANKS`], `page_size` and
    /// `prefill_http_port` at least 1.
    pub fn new(spec: PrefillInfoSpec) -> Result<Self, InvalidValue> {
        let sizes = [spec.attn_tp_size, spec.attn_cp_size, spec.dp_size, spec.pp_size];
        check_size("attn_tp_size", spec.attn_tp_size)?;
        check_size("attn_cp_size", spec.attn_cp_size)?;
        check_size("dp_size", spec.dp_size)?;
        check_size("pp_size", spec.pp_size)?;
        check_product(&sizes)?;
        check_positive("page_size", spec.page_size)?;
        if spec.prefill_http_port == Some(0) {
            return Err(InvalidValue::OutOfRange {
                field: "prefill_http_port",
                value: 0,
                min: 1,
                max: u64::from(u16::MAX),
            });
        }
        Ok(Self { spec })
    }

    /// Whether both say the same as far as this version understands it. A key in `extras` may be another one in each
    /// answer, such as an uptime.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.understood() == other.understood()
    }

    fn understood(&self) -> impl PartialEq {
        let PrefillInfoSpec {
            attn_tp_size,
            attn_cp_size,
            dp_size,
            pp_size,
            page_size,
            kv_cache_dtype,
            follow_bootstrap_room,
            enable_dsa_cache_layer_split,
            enable_kv_cache_sharding,
            prefill_http_port,
            kv_layout,
            decode_allocation_policy,
            dynamic_dp_size,
            spec_layout,
            extras: _,
        } = &self.spec;
        let sizes = (attn_tp_size, attn_cp_size, dp_size, pp_size, page_size);
        let cache = (kv_cache_dtype, enable_dsa_cache_layer_split, enable_kv_cache_sharding, kv_layout);
        let rules = (follow_bootstrap_room, decode_allocation_policy, dynamic_dp_size);
        (sizes, cache, rules, prefill_http_port, spec_layout)
    }

    /// What it was built from.
    #[must_use]
    pub const fn spec(&self) -> &PrefillInfoSpec {
        &self.spec
    }

    /// Attention-TP size of the prefill engine.
    #[must_use]
    pub const fn attn_tp_size(&self) -> u32 {
        self.spec.attn_tp_size
    }

    /// Attention-CP size.
    #[must_use]
    pub const fn attn_cp_size(&self) -> u32 {
        self.spec.attn_cp_size
    }

    /// Data-parallel groups.
    #[must_use]
    pub const fn dp_size(&self) -> u32 {
        self.spec.dp_size
    }

    /// Pipeline stages.
    #[must_use]
    pub const fn pp_size(&self) -> u32 {
        self.spec.pp_size
    }

    /// Whether a room's dp rank is the room modulo `dp_size`; not when `dp_size` is dynamic.
    #[must_use]
    pub const fn follow_bootstrap_room(&self) -> bool {
        self.spec.follow_bootstrap_room
    }

    /// Whether `dp_size` may change while the engine lives.
    #[must_use]
    pub const fn dynamic_dp_size(&self) -> bool {
        self.spec.dynamic_dp_size
    }

    /// Unknown keys of the topology answer.
    #[must_use]
    pub const fn extras(&self) -> &BTreeMap<String, Value> {
        &self.spec.extras
    }
}

/// The greatest parallel size of one kind.
pub const MAX_SIZE: u32 = 65_535;
/// The greatest number of ranks of one engine: dp x cp x tp x pp.
pub const MAX_RANKS: u64 = 65_536;
/// The allocation policy of every engine that does not state one (WIRE.md, E7).
pub const EARLY: &str = "early";
/// The policy under which the decode side allocates after the prefill is done.
pub const PREFILL_COMPLETE: &str = "prefill_complete";

/// The product of sizes, exact: four sizes of at most 2^16 fit a `u64`.
#[must_use]
pub fn rank_count(sizes: &[u32]) -> u64 {
    sizes.iter().fold(1, |product: u64, size| product.saturating_mul(u64::from(*size)))
}

fn check_size(field: &'static str, size: u32) -> Result<(), InvalidValue> {
    if (1..=MAX_SIZE).contains(&size) {
        return Ok(());
    }
    Err(InvalidValue::OutOfRange { field, value: u64::from(size), min: 1, max: u64::from(MAX_SIZE) })
}

fn check_product(sizes: &[u32]) -> Result<(), InvalidValue> {
    let ranks = rank_count(sizes);
    if ranks <= MAX_RANKS {
        return Ok(());
    }
    Err(InvalidValue::TooManyRanks { ranks, max: MAX_RANKS })
}

pub(crate) fn check_rank(
    field: &'static str,
    rank: u32,
    size_field: &'static str,
    size: u32,
) -> Result<(), InvalidValue> {
    if rank < size {
        return Ok(());
    }
    Err(InvalidValue::RankNotBelowSize { field, rank, size_field, size })
}

fn check_positive(field: &'static str, value: Option<u32>) -> Result<(), InvalidValue> {
    if value == Some(0) {
        return Err(InvalidValue::OutOfRange { field, value: 0, min: 1, max: u64::from(u32::MAX) });
    }
    Ok(())
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
