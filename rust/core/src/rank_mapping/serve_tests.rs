use super::*;
use crate::rank_mapping::map_ranks;
use crate::topology::{DecodeRankSpec, PrefillInfoSpec};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use proptest::prelude::*;

/// Pairs of engines whose TP and PP sizes fit, mostly, with every switch that moves the mapping.
fn pairs() -> impl Strategy<Value = (DecodeRankSpec, PrefillInfo)> {
    let sizes = (1_u32..17, 1_u32..9, 0_u8..3, 1_u32..5, 1_u32..4, any::<bool>());
    let switches = (0_usize..3, proptest::option::of(any::<bool>()), any::<bool>(), any::<bool>());
    (sizes, switches).prop_map(|((small, factor, wider, cp, pp, equal_pp), (kv, all_cp, split, sharding))| {
        let (local, remote) = match wider {
            0 => (small * factor, small),
            1 => (small, small * factor),
            _ => (small, small),
        };
        let decode = DecodeRankSpec {
            attn_tp_size: local,
            pp_size: if equal_pp { pp } else { 1 },
            kv: KvKind::NAMES[kv].0,
            all_cp_ranks: all_cp,
            ..Default::default()
        };
        let prefill = PrefillInfoSpec {
            attn_tp_size: remote,
            attn_cp_size: cp,
            pp_size: pp,
            enable_dsa_cache_layer_split: split,
            enable_kv_cache_sharding: sharding,
            ..Default::default()
        };
        (decode, PrefillInfo::new(prefill).unwrap())
    })
}

/// All ranks of one dp group of the decode engine.
fn decode_ranks(spec: &DecodeRankSpec) -> Vec<DecodeRank> {
    let places = (0..spec.pp_size).flat_map(|pp| (0..spec.attn_tp_size).map(move |tp| (tp, pp)));
    places
        .map(|(engine_rank, pp_rank)| {
            DecodeRank::new(DecodeRankSpec { engine_rank, pp_rank, ..spec.clone() })
        })
        .map(Result::unwrap)
        .collect()
}

/// All ranks of one dp group of the prefill engine.
fn prefill_ranks(info: &PrefillInfo) -> Vec<PrefillRank> {
    let (tp, cp, pp) = (info.attn_tp_size(), info.attn_cp_size(), info.pp_size());
    let places = (0..cp).flat_map(|c| (0..tp).flat_map(move |t| (0..pp).map(move |p| (t, c, p))));
    places.map(|(t, c, p)| PrefillRank::new(info, t, c, p).unwrap()).collect()
}

type Place = (u32, u32, u32);
/// For each prefill rank (tp, cp, pp) that is contacted: which decode ranks (tp, pp) contact it, whether as a dummy, and
/// what they were told that it waits for.
type Contacted = BTreeMap<Place, (BTreeSet<(u32, u32)>, BTreeSet<bool>, BTreeSet<u32>)>;

fn contacted(decode: &DecodeRankSpec, info: &PrefillInfo) -> Contacted {
    let mut contacted = Contacted::new();
    for rank in decode_ranks(decode) {
        let mapping = map_ranks(&rank, info).unwrap();
        for contact in mapping.contacts() {
            let entry = contacted.entry((contact.tp, contact.cp, contact.pp)).or_default();
            assert!(entry.0.insert((rank.attn_tp_rank(), rank.spec().pp_rank)), "contacted twice");
            entry.1.insert(contact.dummy);
            entry.2.insert(mapping.required_dst_info_num);
        }
    }
    contacted
}

proptest! {
    /// Law: `serve_ranks` is the exact inverse of `map_ranks` over all ranks of both engines: same edges, same roles, and
    /// the number that every decode rank states is the number of decode ranks that come. Who is not contacted is idle.
    #[test]
    fn the_inverse_is_exact((decode, info) in pairs()) {
        let any_rank = DecodeRank::new(decode.clone()).unwrap();
        if !compat::is_compatible(&any_rank, &info) {
            let first = PrefillRank { tp: 0, cp: 0, pp: 0 };
            prop_assert!(serve_ranks(&any_rank, &info, first).is_err());
            return Ok(());
        }
        let mut contacted = contacted(&decode, &info);
        for rank in prefill_ranks(&info) {
            let served = serve_ranks(&any_rank, &info, rank).unwrap();
            match contacted.remove(&(rank.tp, rank.cp, rank.pp)) {
                None => prop_assert_eq!(served, ServedRanks::Idle),
                Some((edges, dummy, awaited)) => {
                    let DecodeRanks { tp_ranks, pp_rank } = served.decode_ranks().unwrap();
                    let ours: BTreeSet<_> = tp_ranks.ranks().map(|tp| (tp, pp_rank)).collect();
                    prop_assert_eq!(&ours, &edges);
                    prop_assert_eq!(dummy, BTreeSet::from([matches!(served, ServedRanks::Dummy(_))]));
                    prop_assert_eq!(awaited, BTreeSet::from([served.required_dst_info_num()]));
                    prop_assert_eq!(ours.len(), usize::try_from(served.required_dst_info_num()).unwrap());
                }
            }
        }
        prop_assert!(contacted.is_empty(), "a rank that does not exist: {contacted:?}");
    }

    /// Law: both sides count the same edges, and the answers awaited are the real ones of them.
    #[test]
    fn the_counts_agree_on_both_sides((decode, info) in pairs()) {
        let any_rank = DecodeRank::new(decode.clone()).unwrap();
        if !compat::is_compatible(&any_rank, &info) {
            return Ok(());
        }
        let mappings: Vec<_> = decode_ranks(&decode).iter().map(|rank| map_ranks(rank, &info).unwrap()).collect();
        let served: Vec<_> =
            prefill_ranks(&info).into_iter().map(|rank| serve_ranks(&any_rank, &info, rank).unwrap()).collect();
        let contacts: u32 = mappings.iter().map(|mapping| mapping.contact_count()).sum();
        prop_assert_eq!(contacts, served.iter().map(ServedRanks::required_dst_info_num).sum::<u32>());
        let answers: u32 = mappings.iter().map(|mapping| mapping.required_prefill_response_num).sum();
        let real = served.iter().filter(|served| matches!(served, ServedRanks::Real(_)));
        prop_assert_eq!(answers, real.map(ServedRanks::required_dst_info_num).sum::<u32>());
    }

    /// Law: only CP ranks behind the first are ever idle; every other prefill rank is contacted.
    #[test]
    fn only_later_cp_ranks_are_idle((decode, info) in pairs()) {
        let any_rank = DecodeRank::new(decode).unwrap();
        if !compat::is_compatible(&any_rank, &info) {
            return Ok(());
        }
        for rank in prefill_ranks(&info) {
            let idle = serve_ranks(&any_rank, &info, rank).unwrap() == ServedRanks::Idle;
            let all_cp = any_rank.pulls_all_cp_ranks()
                || info.spec().enable_dsa_cache_layer_split
                || info.spec().enable_kv_cache_sharding;
            prop_assert_eq!(idle, rank.cp > 0 && !all_cp);
        }
    }

    /// Law: whatever the sizes are, there is an answer or a reason: no panic and no overflow.
    #[test]
    fn no_sizes_panic_or_overflow(
        (d_tp, d_pp, rank, kv) in (1_u32..65_536, 1_u32..4, any::<u32>(), 0_usize..3),
        (p_tp, p_cp, p_pp) in large_sizes(),
        (t, c, p) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (all_cp, split, sharding) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let decode = DecodeRankSpec {
            attn_tp_size: d_tp, pp_size: d_pp, engine_rank: rank, kv: KvKind::NAMES[kv].0,
            all_cp_ranks: Some(all_cp), num_kv_heads: Some(rank.max(1)), ..Default::default()
        };
        let prefill = PrefillInfoSpec {
            attn_tp_size: p_tp, attn_cp_size: p_cp, pp_size: p_pp,
            enable_dsa_cache_layer_split: split, enable_kv_cache_sharding: sharding, ..Default::default()
        };
        let (Ok(decode), Ok(prefill)) = (DecodeRank::new(decode), PrefillInfo::new(prefill)) else { return Ok(()) };
        let mapped = map_ranks(&decode, &prefill);
        if let Ok(mapping) = mapped {
            prop_assert!(u64::from(mapping.contact_count()) <= compat::MAX_CONTACTS);
            prop_assert_eq!(mapping.contacts().count(), usize::try_from(mapping.contact_count()).unwrap());
        }
        if let Ok(rank) = PrefillRank::new(&prefill, t % p_tp, c % p_cp, p % p_pp) {
            prop_assert_eq!(serve_ranks(&decode, &prefill, rank).is_ok(), mapped.is_ok());
        }
    }
}

/// TP, CP and PP with a product up to the limit; one of the three is often 1.
fn large_sizes() -> impl Strategy<Value = (u32, u32, u32)> {
    (1_u32..65_536, any::<bool>())
        .prop_flat_map(|(tp, deep)| (Just(if deep { tp % 256 + 1 } else { tp }), any::<u32>(), any::<u32>()))
        .prop_map(|(tp, cp, pp)| {
            let cp = cp % (65_536 / tp) + 1;
            (tp, cp.min(65_536 / tp), pp % (65_536 / tp / cp.min(65_536 / tp)) + 1)
        })
}

#[test]
fn a_rank_that_the_engine_does_not_have_is_refused_with_both_values() {
    let info = PrefillInfo::new(PrefillInfoSpec { attn_tp_size: 4, ..Default::default() }).unwrap();
    for (tp, cp, pp, text) in [
        (4, 0, 0, "tp_rank 4: must be below attn_tp_size 4"),
        (0, 1, 0, "cp_rank 1: must be below attn_cp_size 1"),
        (0, 0, u32::MAX, "pp_rank 4294967295: must be below pp_size 1"),
    ] {
        assert_eq!(alloc::format!("{}", PrefillRank::new(&info, tp, cp, pp).unwrap_err()), text);
    }
}

#[test]
fn dummies_wait_for_the_decode_rank_of_their_block_too() {
    let spec = DecodeRankSpec { attn_tp_size: 4, kv: KvKind::Mla, ..Default::default() };
    let decode = DecodeRank::new(spec).unwrap();
    let info = PrefillInfo::new(PrefillInfoSpec { attn_tp_size: 16, ..Default::default() }).unwrap();
    let rank = |tp| serve_ranks(&decode, &info, PrefillRank::new(&info, tp, 0, 0).unwrap()).unwrap();
    let reader = DecodeRanks { tp_ranks: RankRange { first: 1, count: 1 }, pp_rank: 0 };
    assert_eq!(rank(4), ServedRanks::Real(reader));
    for tp in 5..8 {
        assert_eq!(rank(tp), ServedRanks::Dummy(reader));
        assert_eq!((rank(tp).required_dst_info_num(), rank(tp).role()), (1, "dummy"));
    }
}
