use super::*;
use crate::rank_mapping::map_ranks;
use crate::topology::{DecodeRankSpec, PrefillInfoSpec};
use alloc::string::String;
use serde_json::json;

fn reasons(ours: DecodeRankSpec, theirs: PrefillInfoSpec) -> Vec<Reason> {
    check(&DecodeRank::new(ours).unwrap(), &PrefillInfo::new(theirs).unwrap())
}

fn texts(ours: DecodeRankSpec, theirs: PrefillInfoSpec) -> Vec<String> {
    reasons(ours, theirs).iter().map(ToString::to_string).collect()
}

#[test]
fn all_differences_are_reported_at_once_with_both_values() {
    let ours = DecodeRankSpec {
        attn_tp_size: 8,
        attn_cp_size: 2,
        pp_size: 2,
        kv_cache_dtype: Some("bfloat16".into()),
        kv_layout: Some("nhd".into()),
        decode_allocation_policy: Some("prefill_complete".into()),
        num_kv_heads: Some(5),
        dcp_size: 2,
        spec_layout: Some(json!({"block": 4})),
        requires_equal_tp: true,
        ..Default::default()
    };
    let theirs = PrefillInfoSpec {
        attn_tp_size: 3,
        attn_cp_size: 4,
        pp_size: 4,
        page_size: Some(32),
        kv_cache_dtype: Some("fp8_e4m3".into()),
        kv_layout: Some("hnd".into()),
        enable_kv_cache_sharding: true,
        ..Default::default()
    };
    let expected = [
        "page_size 64 here, 32 at the prefill: must be equal",
        "kv_cache_dtype bfloat16 here, fp8_e4m3 at the prefill: must be equal",
        "kv_layout nhd here, hnd at the prefill: must be equal",
        "decode_allocation_policy prefill_complete here, early at the prefill: must be equal",
        "spec_layout {\"block\":4} here, none at the prefill: must be equal",
        "prefill tp 3 cp 4 pp 4: policy prefill_complete needs tp, cp and pp 1",
        "decode tp 8, prefill tp 3: this cache needs equal tp",
        "prefill tp 3 does not divide decode tp 8",
        "num_kv_heads 5 over tp 8 here, 5 over tp 3 at the prefill: one must divide the other",
        "decode cp 2: must be 1",
        "decode pp 2, prefill pp 4: must be equal, or 1 at the decode",
        "dcp_size 2: needs kv mla or hybrid_mla, not mha",
        "dcp_size 2, prefill cp 4: dcp needs prefill cp 1",
        "dcp_size 2, prefill sharding on: dcp needs it off",
    ];
    assert_eq!(texts(ours.clone(), theirs.clone()), expected);
    let ours = DecodeRank::new(ours).unwrap();
    let error = map_ranks(&ours, &PrefillInfo::new(theirs).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), expected.join("; "));
}

#[test]
fn auto_against_a_concrete_dtype_warns_and_refuses_only_when_strict() {
    let theirs = PrefillInfoSpec { kv_cache_dtype: Some("bfloat16".into()), ..Default::default() };
    let lax = reasons(DecodeRankSpec::default(), theirs.clone());
    assert_eq!(lax[0].severity, Severity::Warning);
    let strict = reasons(DecodeRankSpec { strict_dtype: true, ..Default::default() }, theirs);
    assert_eq!(strict[0].severity, Severity::Fatal);
}

#[test]
fn the_spellings_of_one_dtype_are_equal() {
    let ours = DecodeRankSpec { kv_cache_dtype: Some("fp8_e4m3".into()), ..Default::default() };
    let theirs = PrefillInfoSpec { kv_cache_dtype: Some("torch.float8_e4m3fn".into()), ..Default::default() };
    assert!(reasons(ours, theirs).is_empty());
}

#[test]
fn what_one_side_does_not_state_is_not_compared() {
    let ours = DecodeRankSpec {
        kv_layout: Some("nhd".into()),
        decode_allocation_policy: Some("prefill_complete".into()),
        ..Default::default()
    };
    let theirs = PrefillInfoSpec {
        page_size: None,
        kv_cache_dtype: None,
        decode_allocation_policy: None,
        ..Default::default()
    };
    assert!(reasons(ours, theirs).is_empty());
}

#[test]
fn unequal_tp_warns_only_for_per_head_caches() {
    let theirs = PrefillInfoSpec { attn_tp_size: 2, ..Default::default() };
    let mha = texts(DecodeRankSpec::default(), theirs.clone());
    assert_eq!(mha, ["decode tp 1, prefill tp 2: slow when unequal and kv is mha"]);
    let ours = DecodeRankSpec { kv: KvKind::HybridMla, ..Default::default() };
    assert!(texts(ours, theirs).is_empty());
}

#[test]
fn sharded_mla_needs_equal_tp() {
    let ours = DecodeRankSpec { kv: KvKind::Mla, ..Default::default() };
    let theirs = PrefillInfoSpec { attn_tp_size: 2, enable_kv_cache_sharding: true, ..Default::default() };
    assert_eq!(texts(ours, theirs), ["decode tp 1, prefill tp 2: sharded mla needs equal tp"]);
}

#[test]
fn more_contacts_than_one_rank_may_have_are_refused() {
    let ours = DecodeRankSpec { all_cp_ranks: Some(true), ..Default::default() };
    let theirs = PrefillInfoSpec { attn_cp_size: 4_097, ..Default::default() };
    let found = texts(ours, theirs);
    assert_eq!(found, ["4097 contacts of one decode rank: must be at most 4096"]);
    let ours = DecodeRankSpec { all_cp_ranks: Some(true), ..Default::default() };
    assert!(texts(ours, PrefillInfoSpec { attn_cp_size: 4_096, ..Default::default() }).is_empty());
}

#[test]
fn the_limit_of_contacts_sees_every_rank_of_a_sharded_latent() {
    let ours = DecodeRankSpec { attn_tp_size: 4_097, kv: KvKind::Mla, ..Default::default() };
    let theirs =
        PrefillInfoSpec { attn_tp_size: 4_097, enable_kv_cache_sharding: true, ..Default::default() };
    assert_eq!(texts(ours, theirs), ["4097 contacts of one decode rank: must be at most 4096"]);
}

#[test]
fn heads_that_either_side_alone_cannot_deal_out_are_refused_unless_the_cache_has_none() {
    for (local, remote) in [(1, 2), (2, 1)] {
        let pair = |kv| {
            let ours =
                DecodeRankSpec { attn_tp_size: local, num_kv_heads: Some(3), kv, ..Default::default() };
            texts(ours, PrefillInfoSpec { attn_tp_size: remote, ..Default::default() })
        };
        let expected = alloc::format!(
            "num_kv_heads 3 over tp {local} here, 3 over tp {remote} at the prefill: one must divide the other"
        );
        assert_eq!(pair(KvKind::HybridMla), [expected]);
        assert!(pair(KvKind::Mla).is_empty());
    }
}

#[test]
fn a_cache_that_cannot_be_sliced_needs_equal_tp_whichever_side_is_wider() {
    for (local, remote) in [(4, 1), (1, 4)] {
        let kv = KvKind::HybridMla;
        let ours = DecodeRankSpec { attn_tp_size: local, kv, requires_equal_tp: true, ..Default::default() };
        let theirs = PrefillInfoSpec { attn_tp_size: remote, ..Default::default() };
        let expected = alloc::format!("decode tp {local}, prefill tp {remote}: this cache needs equal tp");
        assert_eq!(texts(ours, theirs), [expected]);
    }
}

#[test]
fn decode_cp_above_1_is_refused_at_equal_cp_too() {
    let ours = DecodeRankSpec { attn_cp_size: 2, ..Default::default() };
    let theirs = PrefillInfoSpec { attn_cp_size: 2, ..Default::default() };
    assert_eq!(texts(ours, theirs), ["decode cp 2: must be 1"]);
}

#[test]
fn a_size_that_the_decode_rank_does_not_exceed_is_named_first() {
    let ours = DecodeRankSpec { attn_tp_size: 4, ..Default::default() };
    let theirs = PrefillInfoSpec { attn_tp_size: 6, ..Default::default() };
    assert_eq!(texts(ours, theirs), ["decode tp 4 does not divide prefill tp 6"]);
}
