//! Readiness and the machine of generation.rs.

use alloc::vec;
use alloc::vec::Vec;

use super::super::layout::Sizes;
use super::*;

fn moved(tp: u16, rank: u16) -> Value {
    with(body(tp, rank), "rank_port", json!(3000 + rank))
}

#[test]
fn a02_04_not_ready_until_the_last_rank() {
    let mut registry = registry();
    assert!(topology(&mut registry, 0.0).is_err());
    for rank in 0..4 {
        assert!(!registry.is_ready(at_s(0.0)));
        put(&mut registry, 0.0, &body(4, rank)).unwrap();
    }
    assert_eq!(tp_size(&mut registry, 0.0), Some(4));
    assert_eq!(epoch(&mut registry, 0.0), 1);
}

#[test]
fn a06_02_one_rank_four_times_is_one_rank() {
    let mut registry = registry();
    for _ in 0..4 {
        put(&mut registry, 0.0, &body(4, 0)).unwrap();
    }
    let why = topology(&mut registry, 0.0).unwrap_err();
    assert_eq!(
        why,
        "not ready: 1 of 4 ranks registered; missing (dp, cp, tp, pp): (0, 0, 1, 0) (0, 0, 2, 0) (0, 0, 3, 0)"
    );
    for rank in 1..4 {
        put(&mut registry, 0.0, &body(4, rank)).unwrap();
    }
    assert_eq!(tp_size(&mut registry, 0.0), Some(4));
}

#[test]
fn at_most_16_missing_ranks_are_named() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(40, 20)).unwrap();
    let why = registry.not_ready();
    assert_eq!((why.registered, why.sizes.map(Sizes::ranks)), (1, Some(40)));
    assert_eq!(why.missing.len(), NotReady::NAMED);
    assert!(why.to_string().ends_with("(0, 0, 15, 0) and 23 more"), "{why}");
}

#[test]
fn a04_06_system_dp_counts_where_there_is_one() {
    let mut registry = registry();
    let group = |rank: u16| {
        let body = with(body(1, 0), "system_dp_size", json!(2));
        with(with(body, "system_dp_rank", json!(rank)), "rank_port", json!(2000 + rank))
    };
    put(&mut registry, 0.0, &group(0)).unwrap();
    assert!(!registry.is_ready(at_s(0.0)));
    put(&mut registry, 0.0, &group(1)).unwrap();
    assert_eq!(topology(&mut registry, 0.0).unwrap()["dp_size"], 2);
    let at = |dp| Some(Coordinate { dp, cp: 0, tp: 0, pp: 0 });
    assert_eq!(registry.endpoint(at_s(0.0), at(0)).unwrap().port, 2000);
    assert_eq!(registry.endpoint(at_s(0.0), at(1)).unwrap().port, 2001);
}

#[test]
fn the_rank_of_a_system_of_one_may_be_the_attention_group() {
    let body = with(with(body(1, 0), "attn_dp_size", json!(4)), "attn_dp_rank", json!(3));
    assert_eq!(rank(&with(body, "system_dp_rank", json!(3))).at.dp, 3);
}

#[test]
fn a01_10_cp_ranks_have_rows_of_their_own() {
    let mut registry = registry();
    for cp in 0..8_u16 {
        let body = with(with(body(1, 0), "attn_cp_size", json!(8)), "attn_cp_rank", json!(cp));
        put(&mut registry, 0.0, &with(body, "rank_port", json!(2000 + cp))).unwrap();
    }
    let ports: Vec<u16> = (0..8)
        .map(|cp| Coordinate { dp: 0, cp, tp: 0, pp: 0 })
        .map(|at| registry.endpoint(at_s(0.0), Some(at)).unwrap().port)
        .collect();
    assert_eq!(ports, (2000..2008).collect::<Vec<_>>());
}

#[test]
fn putting_the_same_again_changes_nothing() {
    let mut registry = serving(2);
    let before = registry.table.clone();
    put(&mut registry, 1.0, &body(2, 0)).unwrap();
    assert_eq!(registry.table, before);
    assert_eq!(epoch(&mut registry, 100.0), 1);
}

#[test]
fn a06_03_another_size_takes_over_when_it_is_complete() {
    let mut registry = serving(4);
    let life = registry.stamp(at_s(1.0)).instance;
    put(&mut registry, 1.0, &moved(2, 0)).unwrap();
    assert_eq!(tp_size(&mut registry, 5.0), Some(4), "the old one is served meanwhile");
    assert_eq!(port(&mut registry, 5.0, 0), Some(2000));
    put(&mut registry, 6.0, &moved(2, 1)).unwrap();
    assert_eq!(tp_size(&mut registry, 6.0), Some(2));
    assert_eq!(port(&mut registry, 6.0, 0), Some(3000));
    assert_eq!(port(&mut registry, 6.0, 2), None);
    assert_eq!(epoch(&mut registry, 6.0), 2);
    assert_ne!(registry.stamp(at_s(6.0)).instance, life);
}

#[test]
fn a_differing_scalar_at_a_coordinate_beyond_the_old_sizes_opens_one() {
    let mut registry = serving(2);
    put(&mut registry, 1.0, &moved(4, 3)).unwrap();
    assert!(matches!(registry.table, Table::Replacing { .. }));
}

#[test]
fn a_whole_engine_on_new_endpoints_is_a_new_life() {
    let mut registry = serving(2);
    let life = registry.stamp(at_s(1.0)).instance;
    put(&mut registry, 1.0, &moved(2, 0)).unwrap();
    assert_eq!(port(&mut registry, 1.0, 0), Some(2000), "half a change is not seen");
    put(&mut registry, 1.5, &moved(2, 1)).unwrap();
    assert_eq!(port(&mut registry, 1.5, 0), Some(3000));
    assert_eq!(port(&mut registry, 1.5, 1), Some(3001));
    assert_eq!(epoch(&mut registry, 1.5), 2);
    assert_ne!(registry.stamp(at_s(1.5)).instance, life);
}

#[test]
fn one_rank_on_a_new_endpoint_is_merged_after_two_quiet_seconds() {
    let mut registry = serving(2);
    let life = registry.stamp(at_s(1.0)).instance;
    put(&mut registry, 1.0, &moved(2, 0)).unwrap();
    assert_eq!(port(&mut registry, 2.999, 0), Some(2000));
    assert_eq!(epoch(&mut registry, 2.999), 1);
    assert_eq!(port(&mut registry, 3.0, 0), Some(3000));
    assert_eq!(port(&mut registry, 3.0, 1), Some(2001));
    assert_eq!(epoch(&mut registry, 3.0), 2, "one epoch for all rows");
    assert_eq!(registry.stamp(at_s(3.0)).instance, life, "the engine lives on");
}

#[test]
fn every_registration_puts_the_merge_off() {
    let mut registry = serving(3);
    put(&mut registry, 1.0, &moved(3, 0)).unwrap();
    put(&mut registry, 2.5, &moved(3, 1)).unwrap();
    assert_eq!(port(&mut registry, 4.0, 0), Some(2000));
    assert_eq!(port(&mut registry, 4.5, 0), Some(3000));
    assert_eq!(port(&mut registry, 4.5, 1), Some(3001));
    assert_eq!(epoch(&mut registry, 4.5), 2);
}

#[test]
fn a_rank_that_goes_and_comes_back_is_no_new_epoch() {
    let mut registry = serving(2);
    put(&mut registry, 1.0, &moved(2, 0)).unwrap();
    put(&mut registry, 1.5, &body(2, 0)).unwrap();
    assert_eq!(port(&mut registry, 9.0, 0), Some(2000));
    assert_eq!(epoch(&mut registry, 9.0), 1);
}

#[test]
fn a_forming_generation_is_dropped_after_60_s_without_progress() {
    let mut registry = serving(4);
    put(&mut registry, 10.0, &moved(2, 0)).unwrap();
    put(&mut registry, 50.0, &moved(2, 0)).unwrap(); // known: no progress
    registry.on_timer(at_s(69.9));
    assert!(matches!(registry.table, Table::Replacing { .. }));
    registry.on_timer(at_s(70.0));
    assert!(matches!(registry.table, Table::Serving(_)));
    put(&mut registry, 71.0, &moved(2, 1)).unwrap();
    assert_eq!(tp_size(&mut registry, 71.0), Some(4));
    assert_eq!(epoch(&mut registry, 71.0), 1);
}

#[test]
fn inside_a_forming_generation_another_scalar_at_a_new_coordinate_is_refused() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(4, 0)).unwrap();
    let before = registry.table.clone();
    let conflict = put(&mut registry, 1.0, &body(2, 1)).unwrap_err();
    assert_eq!(
        conflict,
        Conflict { field: "attn_tp_size", registered: "4".into(), sent: "2".into(), as_upstream: false }
    );
    assert_eq!(conflict.to_string(), "attn_tp_size is 2 here and 4 at the ranks that registered before");
    assert_eq!(registry.table, before);
}

#[test]
fn inside_a_forming_generation_another_scalar_at_a_known_coordinate_starts_over() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(4, 0)).unwrap();
    put(&mut registry, 0.0, &body(4, 1)).unwrap();
    put(&mut registry, 1.0, &body(2, 1)).unwrap();
    assert!(!registry.is_ready(at_s(1.0)), "rank 0 is to come again");
    put(&mut registry, 1.0, &body(2, 0)).unwrap();
    assert_eq!(tp_size(&mut registry, 1.0), Some(2));
    assert_eq!(epoch(&mut registry, 1.0), 1);
}

#[test]
fn inside_a_forming_generation_another_endpoint_overwrites() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(2, 0)).unwrap();
    put(&mut registry, 0.0, &moved(2, 0)).unwrap();
    put(&mut registry, 0.0, &body(2, 1)).unwrap();
    assert_eq!(port(&mut registry, 0.0, 0), Some(3000));
    assert_eq!(epoch(&mut registry, 0.0), 1);
}

#[test]
fn every_scalar_is_compared_and_the_two_of_upstream_are_marked() {
    let cases = vec![
        ("attn_cp_size", json!(2), false),
        ("attn_dp_size", json!(2), false),
        ("pp_size", json!(2), false),
        ("page_size", json!(32), false),
        ("kv_cache_dtype", json!("fp8"), false),
        ("kv_layout", json!("HND"), false),
        ("load_balance_method", json!("round_robin"), false),
        ("enable_dsa_cache_layer_split", json!(true), false),
        ("enable_kv_cache_sharding", json!(true), false),
        ("dynamic_dp_size", json!(true), false),
        ("decode_allocation_policy", json!("prefill_complete"), true),
        ("dsv41_spec_layout", json!({"a": 1}), true),
    ];
    for (field, value, as_upstream) in cases {
        let mut registry = registry();
        put(&mut registry, 0.0, &with(body(4, 0), "kv_layout", json!("NHD"))).unwrap();
        let conflict = put(&mut registry, 0.0, &with(body(4, 1), field, value)).unwrap_err();
        let expected = if field == "attn_dp_size" { "dp_size" } else { field };
        assert_eq!((conflict.field, conflict.as_upstream), (expected, as_upstream));
    }
}

#[test]
fn the_http_port_is_never_compared_and_the_first_one_counts() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(3, 0)).unwrap();
    put(&mut registry, 0.0, &with(body(3, 1), "prefill_http_port", json!(30000))).unwrap();
    put(&mut registry, 0.0, &with(body(3, 2), "prefill_http_port", json!(30001))).unwrap();
    assert_eq!(topology(&mut registry, 0.0).unwrap()["prefill_http_port"], 30000);
    put(&mut registry, 1.0, &with(body(3, 2), "prefill_http_port", json!(9))).unwrap();
    assert_eq!(epoch(&mut registry, 1.0), 1);
}

#[test]
fn what_one_rank_leaves_out_another_one_states() {
    let mut registry = registry();
    put(&mut registry, 0.0, &with(body(2, 0), "kv_cache_dtype", Value::Null)).unwrap();
    put(&mut registry, 0.0, &body(2, 1)).unwrap();
    assert_eq!(topology(&mut registry, 0.0).unwrap()["kv_cache_dtype"], "bfloat16");
}

#[test]
fn a_late_repetition_of_the_old_engine_does_not_disturb_the_new_one() {
    let mut registry = serving(4);
    put(&mut registry, 1.0, &moved(2, 0)).unwrap();
    put(&mut registry, 2.0, &body(4, 0)).unwrap();
    put(&mut registry, 3.0, &moved(2, 1)).unwrap();
    assert_eq!(tp_size(&mut registry, 3.0), Some(2));
}

#[test]
fn the_first_generation_is_not_dropped_by_time() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(4, 0)).unwrap();
    registry.on_timer(at_s(1000.0));
    put(&mut registry, 1000.0, &body(4, 1)).unwrap();
    assert_eq!(registry.not_ready().registered, 2);
}

#[test]
fn the_first_generation_gives_way_to_another_once_it_is_stale() {
    let mut registry = registry();
    put(&mut registry, 0.0, &body(4, 0)).unwrap();
    assert!(put(&mut registry, 59.9, &body(2, 1)).is_err());
    put(&mut registry, 60.0, &body(2, 1)).unwrap();
    put(&mut registry, 60.0, &body(2, 0)).unwrap();
    assert_eq!(tp_size(&mut registry, 60.0), Some(2));
}
