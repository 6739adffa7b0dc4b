//! Which prefill ranks one decode rank reads, how many answers each side awaits, and the inverse ([`serve_ranks`]): which
//! decode ranks one prefill rank serves (DESIGN.md section 5).
//!
//! The rank sets are ranges, so a mapping is a few words whatever the sizes are. Source of the formulas: SGLang 0.5.23,
//! `CommonKVManager._resolve_rank_mapping`, for sizes that divide; the others are refused by [`crate::compat`].

use alloc::vec::Vec;
use core::iter::FusedIterator;
use core::ops::Range;

use crate::compat::{self, Incompatible};
use crate::topology::{DecodeRank, KvKind, PrefillInfo};

mod serve;

pub use serve::{DecodeRanks, PrefillRank, ServedRanks, serve_ranks};

/// Consecutive ranks `first .. first + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankRange {
    /// The lowest rank.
    pub first: u32,
    /// How many, at least 1.
    pub count: u32,
}

impl RankRange {
    /// The ranks, ascending.
    #[must_use]
    pub const fn ranks(self) -> Range<u32> {
        self.first..self.first.saturating_add(self.count)
    }

    /// The range of these ranks if they are consecutive, ascending and at least one.
    #[must_use]
    pub fn spanning(ranks: &[u32]) -> Option<Self> {
        let (first, count) = (*ranks.first()?, u32::try_from(ranks.len()).ok()?);
        first.checked_add(count)?;
        let range = Self { first, count };
        range.ranks().eq(ranks.iter().copied()).then_some(range)
    }
}

/// The prefill ranks that one decode rank reads, of any one dp group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankMapping {
    /// The TP rank whose data is real; `None` when every rank of `target_tp_ranks` is (sharded MLA).
    pub target_tp_rank: Option<u32>,
    /// The TP ranks to contact.
    pub target_tp_ranks: RankRange,
    /// The CP ranks to contact.
    pub target_cp_ranks: RankRange,
    /// The stages to contact.
    pub target_pp_ranks: RankRange,
    /// How many decode ranks each contacted prefill rank waits for.
    pub required_dst_info_num: u32,
    /// How many prefill ranks answer this decode rank.
    pub required_prefill_response_num: u32,
}

impl RankMapping {
    /// How many prefill ranks this decode rank contacts: at most 4,096 in a mapping from [`map_ranks`].
    #[must_use]
    pub const fn contact_count(&self) -> u32 {
        self.target_cp_ranks
            .count
            .saturating_mul(self.target_tp_ranks.count)
            .saturating_mul(self.target_pp_ranks.count)
    }

    /// Whether only `target_tp_rank` is read and the other TP ranks are contacted as dummies (MLA, prefill TP above
    /// decode TP): then fewer ranks answer than are contacted.
    #[must_use]
    pub const fn has_dummies(&self) -> bool {
        self.required_prefill_response_num < self.contact_count()
    }

    /// The TP ranks that are contacted and not read, ascending; none unless the mapping has dummies.
    #[must_use]
    pub fn dummy_tp_ranks(&self) -> Vec<u32> {
        self.target_tp_ranks.ranks().filter(|&tp| self.is_dummy(tp)).collect()
    }

    /// Whether a TP rank of those to contact is not read.
    const fn is_dummy(&self, tp: u32) -> bool {
        match self.target_tp_rank {
            Some(real) => tp != real && self.has_dummies(),
            None => false,
        }
    }

    /// The ranks to contact, in contact order: CP ascending, then TP ascending, then PP descending (later stages first,
    /// so that no stage sees a request before the stages behind it).
    #[must_use]
    pub const fn contacts(&self) -> Contacts {
        Contacts { mapping: *self, next: 0, end: self.contact_count() }
    }

    /// The contact at `index` of the contact order.
    #[must_use]
    pub const fn contact(&self, index: u32) -> Option<Contact> {
        if index >= self.contact_count() {
            return None;
        }
        let (stages, block) = (self.target_pp_ranks.count, self.target_tp_ranks.count);
        let tp = self.target_tp_ranks.first + index / stages % block;
        Some(Contact {
            cp: self.target_cp_ranks.first + index / stages / block,
            tp,
            pp: self.target_pp_ranks.first + (stages - 1 - index % stages),
            dummy: self.is_dummy(tp),
        })
    }
}

/// One prefill rank to contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Contact {
    /// Its CP rank.
    pub cp: u32,
    /// Its TP rank.
    pub tp: u32,
    /// Its stage.
    pub pp: u32,
    /// It is told where this decode rank is, but its data is not read and it does not answer.
    pub dummy: bool,
}

/// The contacts of a mapping in contact order.
#[derive(Clone, Debug)]
pub struct Contacts {
    mapping: RankMapping,
    next: u32,
    end: u32,
}

impl Iterator for Contacts {
    type Item = Contact;

    fn next(&mut self) -> Option<Contact> {
        let contact = self.mapping.contact(self.next)?;
        self.next += 1;
        Some(contact)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.end.saturating_sub(self.next)).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Contacts {}
impl FusedIterator for Contacts {}

/// Checks the pair and maps the decode rank onto the prefill engine.
///
/// A compatible pair costs no allocation. The answer holds for every dp group of the engine and until its topology
/// changes.
///
/// # Errors
/// [`Incompatible`] with all differences, warnings too, if any of them is fatal.
pub fn map_ranks(decode: &DecodeRank, prefill: &PrefillInfo) -> Result<RankMapping, Incompatible> {
    compat::refuse_incompatible(decode, prefill)?;
    Ok(resolve(decode, prefill))
}

/// The KV heads that `rank` of a TP group holds, of `num_kv_heads` in the whole model.
///
/// With more ranks than heads each head has its replicas on consecutive ranks. `None` when neither number divides the
/// other (no engine defines a partition then) or the rank is not below `tp_size`.
#[must_use]
pub fn kv_head_range(num_kv_heads: u32, tp_size: u32, rank: u32) -> Option<Range<u32>> {
    if rank >= tp_size || num_kv_heads == 0 {
        return None;
    }
    if num_kv_heads.is_multiple_of(tp_size) {
        let held = num_kv_heads / tp_size;
        return Some(rank * held..(rank + 1) * held);
    }
    if tp_size.is_multiple_of(num_kv_heads) {
        let head = rank / (tp_size / num_kv_heads);
        return Some(head..head + 1);
    }
    None
}

/// The number of contacts that [`resolve`] would give, exact and before anything is built.
pub(crate) fn count_contacts(decode: &DecodeRank, prefill: &PrefillInfo) -> u64 {
    let block = if is_tp_sharded(decode, prefill) {
        prefill.attn_tp_size()
    } else {
        (prefill.attn_tp_size() / decode.attn_tp_size()).max(1)
    };
    let cp = cp_ranks(decode, prefill).count;
    let pp = pp_ranks(decode, prefill).count;
    u64::from(block) * u64::from(cp) * u64::from(pp)
}

/// Every prefill TP rank holds other pages of the same latent, so every decode rank reads all of them.
pub(crate) fn is_tp_sharded(decode: &DecodeRank, prefill: &PrefillInfo) -> bool {
    decode.kv() == KvKind::Mla && prefill.spec().enable_kv_cache_sharding && prefill.attn_cp_size() == 1
}

fn resolve(decode: &DecodeRank, prefill: &PrefillInfo) -> RankMapping {
    let tp = tp_side(decode, prefill);
    let target_cp_ranks = cp_ranks(decode, prefill);
    let target_pp_ranks = pp_ranks(decode, prefill);
    RankMapping {
        target_tp_rank: tp.real,
        target_tp_ranks: tp.ranks,
        target_cp_ranks,
        target_pp_ranks,
        required_dst_info_num: tp.destinations,
        required_prefill_response_num: tp.answers * target_cp_ranks.count * target_pp_ranks.count,
    }
}

struct TpSide {
    real: Option<u32>,
    ranks: RankRange,
    destinations: u32,
    answers: u32,
}

fn tp_side(decode: &DecodeRank, prefill: &PrefillInfo) -> TpSide {
    let (local, remote) = (decode.attn_tp_size(), prefill.attn_tp_size());
    let rank = decode.attn_tp_rank();
    if is_tp_sharded(decode, prefill) {
        return TpSide {
            real: None,
            ranks: RankRange { first: 0, count: remote },
            destinations: local,
            answers: remote,
        };
    }
    if local >= remote {
        let per_source = local / remote;
        let source = rank / per_source;
        return TpSide {
            real: Some(source),
            ranks: RankRange { first: source, count: 1 },
            destinations: per_source,
            answers: 1,
        };
    }
    let block = remote / local;
    TpSide {
        real: Some(rank * block),
        ranks: RankRange { first: rank * block, count: block },
        destinations: 1,
        answers: if decode.kv() == KvKind::Mla { 1 } else { block },
    }
}

fn cp_ranks(decode: &DecodeRank, prefill: &PrefillInfo) -> RankRange {
    let spec = prefill.spec();
    let all =
        decode.pulls_all_cp_ranks() || spec.enable_dsa_cache_layer_split || spec.enable_kv_cache_sharding;
    RankRange { first: 0, count: if all { spec.attn_cp_size } else { 1 } }
}

fn pp_ranks(decode: &DecodeRank, prefill: &PrefillInfo) -> RankRange {
    let spec = decode.spec();
    if spec.pp_size == prefill.pp_size() {
        return RankRange { first: spec.pp_rank, count: 1 };
    }
    RankRange { first: 0, count: prefill.pp_size() }
}

#[cfg(test)]
#[path = "rank_mapping_tests.rs"]
mod tests;
