//! An engine's parallel sizes and the scalars that all its ranks must agree on.

use alloc::string::{String, ToString};

use serde_json::Value;

use super::fields::shown;
use super::generation::Conflict;
use super::refusal::BadInput;

/// Most ranks that one engine may have.
pub const MAX_RANKS: u64 = 65_536;

/// An engine's parallel sizes, each at least 1, 65,536 ranks at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Data-parallel groups.
    pub dp: u16,
    /// Attention context-parallel size.
    pub cp: u16,
    /// Attention tensor-parallel size.
    pub tp: u16,
    /// Pipeline stages.
    pub pp: u16,
}

impl Sizes {
    /// Checks the product.
    ///
    /// # Errors
    /// [`BadInput::TooManyRanks`].
    pub fn checked(self) -> Result<Self, BadInput> {
        // Four factors below 2^16 cannot overflow 64 bits.
        let ranks = u64::from(self.dp)
            .saturating_mul(u64::from(self.cp))
            .saturating_mul(u64::from(self.tp))
            .saturating_mul(u64::from(self.pp));
        if ranks > MAX_RANKS {
            return Err(BadInput::TooManyRanks(self));
        }
        Ok(self)
    }

    /// How many ranks the engine has.
    #[must_use]
    pub fn ranks(self) -> usize {
        usize::from(self.dp)
            .saturating_mul(usize::from(self.cp))
            .saturating_mul(usize::from(self.tp))
            .saturating_mul(usize::from(self.pp))
    }

    /// All coordinates in their order.
    pub fn coordinates(self) -> impl Iterator<Item = Coordinate> {
        (0..self.dp).flat_map(move |dp| {
            (0..self.cp).flat_map(move |cp| {
                (0..self.tp).flat_map(move |tp| (0..self.pp).map(move |pp| Coordinate { dp, cp, tp, pp }))
            })
        })
    }
}

/// Where one rank stands in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Coordinate {
    /// Data-parallel group.
    pub dp: u16,
    /// Attention context-parallel rank.
    pub cp: u16,
    /// Attention tensor-parallel rank.
    pub tp: u16,
    /// Pipeline stage.
    pub pp: u16,
}

/// What every rank of one life of an engine says the same about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Parallel sizes.
    pub sizes: Sizes,
    /// Tokens in a KV page; not stated by the oldest prefills.
    pub page_size: Option<u32>,
    /// KV dtype, "auto" included.
    pub kv_cache_dtype: Option<String>,
    /// KV layout.
    pub kv_layout: Option<String>,
    /// Whether a room's dp rank is the room modulo the dp size.
    pub follow_bootstrap_room: bool,
    /// Whether each CP rank holds some of the layers.
    pub enable_dsa_cache_layer_split: bool,
    /// Whether each rank holds some of the pages.
    pub enable_kv_cache_sharding: bool,
    /// Whether the dp size changes while the engine lives.
    pub dynamic_dp_size: bool,
    /// "early" or "prefill_complete", or what later versions say.
    pub decode_allocation_policy: String,
    /// Layout of a speculative draft, an object.
    pub dsv41_spec_layout: Option<Value>,
}

impl Layout {
    /// The first scalar in which `sent` contradicts `self`, the hard conflicts first. A page size,
    /// dtype or layout that one side does not state is no contradiction.
    #[must_use]
    pub fn difference(&self, sent: &Self) -> Option<Conflict> {
        let (a, b) = (self, sent);
        number("attn_tp_size", a.sizes.tp, b.sizes.tp)
            .or_else(|| number("attn_cp_size", a.sizes.cp, b.sizes.cp))
            .or_else(|| number("dp_size", a.sizes.dp, b.sizes.dp))
            .or_else(|| number("pp_size", a.sizes.pp, b.sizes.pp))
            .or_else(|| stated("page_size", a.page_size.as_ref(), b.page_size.as_ref()))
            .or_else(|| {
                let (a, b) = (a.kv_cache_dtype.as_ref(), b.kv_cache_dtype.as_ref());
                stated("kv_cache_dtype", a, b)
            })
            .or_else(|| stated("kv_layout", a.kv_layout.as_ref(), b.kv_layout.as_ref()))
            .or_else(|| self.differing_flag(sent))
            .or_else(|| self.soft_difference(sent))
    }

    /// Takes over from `sent` what is not stated yet.
    pub fn fill_from(&mut self, sent: &Self) {
        self.page_size = self.page_size.or(sent.page_size);
        if self.kv_cache_dtype.is_none() {
            self.kv_cache_dtype.clone_from(&sent.kv_cache_dtype);
        }
        if self.kv_layout.is_none() {
            self.kv_layout.clone_from(&sent.kv_layout);
        }
    }

    fn differing_flag(&self, sent: &Self) -> Option<Conflict> {
        [
            ("load_balance_method", self.follow_bootstrap_room, sent.follow_bootstrap_room),
            (
                "enable_dsa_cache_layer_split",
                self.enable_dsa_cache_layer_split,
                sent.enable_dsa_cache_layer_split,
            ),
            ("enable_kv_cache_sharding", self.enable_kv_cache_sharding, sent.enable_kv_cache_sharding),
            ("dynamic_dp_size", self.dynamic_dp_size, sent.dynamic_dp_size),
        ]
        .into_iter()
        .find(|(_, registered, sent)| registered != sent)
        .map(|(field, registered, sent)| Conflict {
            field,
            registered: registered.to_string(),
            sent: sent.to_string(),
            as_upstream: false,
        })
    }

    /// The two that upstream itself compares, and answers with 400.
    fn soft_difference(&self, sent: &Self) -> Option<Conflict> {
        if self.decode_allocation_policy != sent.decode_allocation_policy {
            return Some(Conflict {
                field: "decode_allocation_policy",
                registered: shown(&self.decode_allocation_policy),
                sent: shown(&sent.decode_allocation_policy),
                as_upstream: true,
            });
        }
        if self.dsv41_spec_layout != sent.dsv41_spec_layout {
            let text = |value: &Option<Value>| value.as_ref().unwrap_or(&Value::Null).to_string();
            return Some(Conflict {
                field: "dsv41_spec_layout",
                registered: shown(&text(&self.dsv41_spec_layout)),
                sent: shown(&text(&sent.dsv41_spec_layout)),
                as_upstream: true,
            });
        }
        None
    }
}

fn number(field: &'static str, registered: u16, sent: u16) -> Option<Conflict> {
    stated(field, Some(&registered), Some(&sent))
}

fn stated<T: PartialEq + ToString>(
    field: &'static str,
    registered: Option<&T>,
    sent: Option<&T>,
) -> Option<Conflict> {
    let (registered, sent) = (registered?, sent?);
    (registered != sent).then(|| Conflict {
        field,
        registered: shown(&registered.to_string()),
        sent: shown(&sent.to_string()),
        as_upstream: false,
    })
}
