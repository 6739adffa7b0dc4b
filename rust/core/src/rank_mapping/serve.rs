//! The mapping seen from the prefill engine: which decode ranks one of its ranks serves (the inverse of
//! [`map_ranks`](super::map_ranks)).

use super::{RankRange, cp_ranks, is_tp_sharded};
use crate::compat::{self, Incompatible};
use crate::error::InvalidValue;
use crate::topology::{DecodeRank, KvKind, PrefillInfo, check_rank};

/// One rank of a prefill engine, within any one of its dp groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefillRank {
    tp: u32,
    cp: u32,
    pp: u32,
}

impl PrefillRank {
    /// The rank of `prefill` at these places.
    ///
    /// # Errors
    /// The first rank that is not below its size.
    pub fn new(prefill: &PrefillInfo, tp: u32, cp: u32, pp: u32) -> Result<Self, InvalidValue> {
        check_rank("tp_rank", tp, "attn_tp_size", prefill.attn_tp_size())?;
        check_rank("cp_rank", cp, "attn_cp_size", prefill.attn_cp_size())?;
        check_rank("pp_rank", pp, "pp_size", prefill.pp_size())?;
        Ok(Self { tp, cp, pp })
    }
}

/// What one prefill rank has to do for the requests of a decode engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServedRanks {
    /// No decode rank contacts it: it waits for nobody and sends nothing.
    Idle,
    /// Decode ranks contact it and read the same data from another rank: it waits for them and sends nothing.
    Dummy(DecodeRanks),
    /// Decode ranks read from it: it waits for them, sends to each and answers each.
    Real(DecodeRanks),
}

impl ServedRanks {
    /// `idle`, `dummy` or `real`.
    #[must_use]
    pub const fn role(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Dummy(_) => "dummy",
            Self::Real(_) => "real",
        }
    }

    /// The decode ranks that contact it; `None` when it is idle.
    #[must_use]
    pub const fn decode_ranks(&self) -> Option<DecodeRanks> {
        match self {
            Self::Idle => None,
            Self::Dummy(ranks) | Self::Real(ranks) => Some(*ranks),
        }
    }

    /// How many decode ranks must contact it for one request before it may go on: what each of their mappings says as
    /// [`RankMapping::required_dst_info_num`](super::RankMapping::required_dst_info_num), and 0 when it is idle.
    #[must_use]
    pub const fn required_dst_info_num(&self) -> u32 {
        match self.decode_ranks() {
            Some(ranks) => ranks.tp_ranks.count,
            None => 0,
        }
    }
}

/// The ranks of one dp group of the decode engine that contact a prefill rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeRanks {
    /// Their attention-TP ranks.
    pub tp_ranks: RankRange,
    /// Their stage.
    pub pp_rank: u32,
}

/// Checks the pair and says which ranks of the decode engine `rank`, one of `prefill`'s, serves.
///
/// `decode` stands for its engine: any of its ranks gives the same answer. The answer holds for every dp group of both
/// engines and until the topology changes.
///
/// # Errors
/// [`Incompatible`] with all differences, warnings too, if any of them is fatal.
pub fn serve_ranks(
    decode: &DecodeRank,
    prefill: &PrefillInfo,
    rank: PrefillRank,
) -> Result<ServedRanks, Incompatible> {
    compat::refuse_incompatible(decode, prefill)?;
    // CP ranks are read from the first on: all of them, or only that one.
    if rank.cp >= cp_ranks(decode, prefill).count {
        return Ok(ServedRanks::Idle);
    }
    let pp_rank = if decode.spec().pp_size == prefill.pp_size() { rank.pp } else { 0 };
    let (local, remote) = (decode.attn_tp_size(), prefill.attn_tp_size());
    let served = |first, count| DecodeRanks { tp_ranks: RankRange { first, count }, pp_rank };
    if is_tp_sharded(decode, prefill) {
        return Ok(ServedRanks::Real(served(0, local)));
    }
    if local >= remote {
        let per_source = local / remote;
        return Ok(ServedRanks::Real(served(rank.tp * per_source, per_source)));
    }
    let block = remote / local;
    let reader = served(rank.tp / block, 1);
    // Ranks of one block hold the same latent: the first sends it for all.
    if decode.kv() == KvKind::Mla && !rank.tp.is_multiple_of(block) {
        return Ok(ServedRanks::Dummy(reader));
    }
    Ok(ServedRanks::Real(reader))
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
