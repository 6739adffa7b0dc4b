use super::*;
use crate::topology::{DecodeRankSpec, PrefillInfoSpec};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use proptest::prelude::*;

fn decode(attn_tp_size: u32, engine_rank: u32, kv: KvKind) -> DecodeRank {
    DecodeRank::new(DecodeRankSpec { attn_tp_size, engine_rank, kv, ..Default::default() }).unwrap()
}

fn prefill(attn_tp_size: u32, attn_cp_size: u32, pp_size: u32) -> PrefillInfo {
    let spec = PrefillInfoSpec { attn_tp_size, attn_cp_size, pp_size, ..Default::default() };
    PrefillInfo::new(spec).unwrap()
}

#[test]
fn mla_contacts_the_block_and_reads_its_first_rank() {
    let mapping = map_ranks(&decode(4, 1, KvKind::Mla), &prefill(16, 1, 1)).unwrap();
    let contacts: Vec<_> = mapping.contacts().map(|c| (c.tp, c.dummy)).collect();
    assert_eq!(contacts, [(4, false), (5, true), (6, true), (7, true)]);
    assert_eq!(mapping.required_dst_info_num, 1);
    assert_eq!(mapping.required_prefill_response_num, 1);
}

#[test]
fn later_stages_are_contacted_first() {
    let mapping = map_ranks(&decode(2, 1, KvKind::Mha), &prefill(4, 1, 2)).unwrap();
    let contacts: Vec<_> = mapping.contacts().map(|c| (c.tp, c.pp)).collect();
    assert_eq!(contacts, [(2, 1), (2, 0), (3, 1), (3, 0)]);
    assert_eq!(mapping.required_prefill_response_num, 4);
}

#[test]
fn hybrid_mla_reads_all_cp_ranks_and_the_whole_block() {
    let mapping = map_ranks(&decode(2, 0, KvKind::HybridMla), &prefill(4, 2, 1)).unwrap();
    assert_eq!(mapping.required_prefill_response_num, 4);
    assert!(!mapping.has_dummies());
    assert_eq!(mapping.contacts().len(), 4);
}

#[test]
fn all_cp_ranks_is_taken_as_said_for_hybrid_mla_too() {
    let spec = DecodeRankSpec { kv: KvKind::HybridMla, all_cp_ranks: Some(false), ..Default::default() };
    let mapping = map_ranks(&DecodeRank::new(spec).unwrap(), &prefill(1, 2, 1)).unwrap();
    assert_eq!(mapping.target_cp_ranks, RankRange { first: 0, count: 1 });
}

fn sharded_prefill(attn_tp_size: u32, attn_cp_size: u32) -> PrefillInfo {
    let spec = prefill(attn_tp_size, attn_cp_size, 1).spec().clone();
    PrefillInfo::new(PrefillInfoSpec { enable_kv_cache_sharding: true, ..spec }).unwrap()
}

#[test]
fn every_rank_of_a_sharded_latent_is_read_and_none_is_the_real_one() {
    let mapping = map_ranks(&decode(4, 1, KvKind::Mla), &sharded_prefill(4, 1)).unwrap();
    assert_eq!(mapping.target_tp_rank, None);
    assert_eq!(mapping.target_tp_ranks, RankRange { first: 0, count: 4 });
    assert_eq!((mapping.required_dst_info_num, mapping.required_prefill_response_num), (4, 4));
}

#[test]
fn sharding_over_cp_ranks_does_not_act_in_tp() {
    let mapping = map_ranks(&decode(4, 1, KvKind::Mla), &sharded_prefill(4, 2)).unwrap();
    assert_eq!((mapping.target_tp_rank, mapping.target_tp_ranks.count), (Some(1), 1));
    assert_eq!(mapping.target_cp_ranks, RankRange { first: 0, count: 2 });
    assert_eq!((mapping.required_dst_info_num, mapping.required_prefill_response_num), (1, 2));
}

#[test]
fn sharding_of_a_cache_with_heads_does_not_act_in_tp() {
    for kv in [KvKind::Mha, KvKind::HybridMla] {
        let mapping = map_ranks(&decode(4, 1, kv), &sharded_prefill(4, 1)).unwrap();
        assert_eq!((mapping.target_tp_rank, mapping.target_tp_ranks.count), (Some(1), 1));
    }
}

#[test]
fn heads_are_dealt_in_blocks_and_replicas_are_neighbours() {
    let heads =
        |total, tp| -> Vec<_> { (0..tp).map(|rank| kv_head_range(total, tp, rank).unwrap().start).collect() };
    assert_eq!(heads(2, 4), [0, 0, 1, 1]);
    assert_eq!(heads(8, 4), [0, 2, 4, 6]);
    assert_eq!(kv_head_range(6, 4, 0), None);
    assert_eq!(kv_head_range(4, 4, 4), None);
}

#[test]
fn only_consecutive_ranks_are_a_range() {
    let range = RankRange { first: 3, count: 2 };
    assert_eq!(RankRange::spanning(&[3, 4]), Some(range));
    for ranks in [&[][..], &[3, 5], &[4, 3], &[3, 3], &[u32::MAX]] {
        assert_eq!(RankRange::spanning(ranks), None);
    }
}

proptest! {
    /// Law: over all decode ranks every prefill rank is contacted, by exactly the number of ranks that it waits for.
    #[test]
    fn every_prefill_rank_hears_from_as_many_decode_ranks_as_it_waits_for(
        (local, remote) in sizes_that_divide(), cp in 1_u32..5, pp in 1_u32..5, kv in 0_usize..3,
    ) {
        let kv = KvKind::NAMES[kv].0;
        let info = prefill(remote, cp, pp);
        let mut heard = alloc::vec![0_u32; usize::try_from(remote).unwrap()];
        let mut awaited = BTreeSet::new();
        for rank in 0..local {
            let mapping = map_ranks(&decode(local, rank, kv), &info).unwrap();
            for tp in mapping.target_tp_ranks.ranks() {
                heard[usize::try_from(tp).unwrap()] += 1;
            }
            awaited.insert(mapping.required_dst_info_num);
        }
        prop_assert_eq!(heard.iter().copied().collect::<BTreeSet<_>>(), awaited);
    }

    /// Law: the contacts that are not dummies are exactly the answers awaited, all distinct.
    #[test]
    fn the_answers_awaited_are_the_contacts_that_are_read(
        (local, remote) in sizes_that_divide(), rank in 0_u32..1_000, cp in 1_u32..5, pp in 1_u32..5,
        kv in 0_usize..3,
    ) {
        let mapping = map_ranks(&decode(local, rank, KvKind::NAMES[kv].0), &prefill(remote, cp, pp)).unwrap();
        let contacts: Vec<_> = mapping.contacts().collect();
        let read = contacts.iter().filter(|contact| !contact.dummy).count();
        prop_assert_eq!(u32::try_from(read).unwrap(), mapping.required_prefill_response_num);
        let distinct: BTreeSet<_> = contacts.iter().map(|c| (c.cp, c.tp, c.pp)).collect();
        prop_assert_eq!(distinct.len(), contacts.len());
    }

    /// Law (A1-06): the heads of the ranks that are read cover the heads that the decode rank needs.
    #[test]
    fn the_ranks_read_hold_every_head_that_the_decode_rank_needs(
        (local, remote) in sizes_that_divide(), rank in 0_u32..1_000, heads in 1_u32..65,
    ) {
        let decode = decode(local, rank, KvKind::Mha);
        let Some(needed) = kv_head_range(heads, local, decode.attn_tp_rank()) else { return Ok(()) };
        if kv_head_range(heads, remote, 0).is_none() {
            return Ok(());
        }
        let mapping = map_ranks(&decode, &prefill(remote, 1, 1)).unwrap();
        let held: BTreeSet<_> = mapping
            .target_tp_ranks
            .ranks()
            .flat_map(|tp| kv_head_range(heads, remote, tp).unwrap())
            .collect();
        prop_assert!(needed.clone().all(|head| held.contains(&head)));
    }
}

fn sizes_that_divide() -> impl Strategy<Value = (u32, u32)> {
    (1_u32..33, 1_u32..17, any::<bool>()).prop_map(|(small, factor, decode_is_small)| {
        if decode_is_small { (small, small * factor) } else { (small * factor, small) }
    })
}
