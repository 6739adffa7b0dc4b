//! Topology answers for readers of every era.

use alloc::vec::Vec;

use super::*;

fn answer(body: &Value, old_decodes: bool, view: View) -> Value {
    let options = Options { old_decodes, ..Options::DEFAULT };
    let mut registry = Registry::new(&options, 7);
    put(&mut registry, 0.0, body).unwrap();
    serde_json::from_str(&registry.topology(at_s(0.0), view).unwrap()).unwrap()
}

fn keys(answer: &Value) -> Vec<&str> {
    answer.as_object().unwrap().keys().map(String::as_str).collect()
}

const E4: [&str; 13] = [
    "attn_cp_size",
    "attn_tp_size",
    "dp_size",
    "follow_bootstrap_room",
    "kv_cache_dtype",
    "page_size",
    "pp_size",
    "required_dst_info_num",
    "required_prefill_response_num",
    "target_cp_ranks",
    "target_pp_ranks",
    "target_tp_rank",
    "target_tp_ranks",
];

#[test]
fn an_old_prefill_is_answered_for_in_its_own_era() {
    let old = answer(&body(1, 0), false, TOPOLOGY);
    assert_eq!(keys(&old), E4);
    assert_eq!(old["target_tp_rank"], Value::Null);
}

#[test]
fn a_client_of_ours_is_told_everything() {
    let view = View { knows_newer_keys: true, ..TOPOLOGY };
    let told = answer(&body(1, 0), false, view);
    assert_eq!(told["enable_kv_cache_sharding"], false);
    assert_eq!(told["decode_allocation_policy"], "early");
    assert_eq!(told["prefill_http_port"], Value::Null);
    assert!(told.get("kv_layout").is_none() && told.get("dynamic_dp_size").is_none());
}

#[test]
fn a_new_prefill_is_answered_for_with_every_key() {
    let body = with(body(1, 0), "enable_kv_cache_sharding", json!(false));
    let told = answer(&body, false, TOPOLOGY);
    assert_eq!(told["enable_dsa_cache_layer_split"], false);
    assert_eq!(keys(&told).len(), E4.len() + 4);
}

#[test]
fn an_optional_that_is_null_is_absent() {
    let body = with(with(body(1, 0), "prefill_http_port", Value::Null), "kv_layout", Value::Null);
    assert_eq!(keys(&answer(&body, false, TOPOLOGY)), E4);
}

#[test]
fn old_decodes_are_told_only_what_matters() {
    let plain =
        with(with(body(1, 0), "prefill_http_port", json!(30000)), "decode_allocation_policy", json!("early"));
    assert_eq!(keys(&answer(&plain, true, TOPOLOGY)), E4);
    let special = with(with(plain, "kv_layout", json!("HND")), "enable_kv_cache_sharding", json!(true));
    let special = with(special, "decode_allocation_policy", json!("prefill_complete"));
    let told = answer(&special, true, TOPOLOGY);
    assert_eq!(told["kv_layout"], "HND");
    assert_eq!(told["enable_kv_cache_sharding"], true);
    assert_eq!(told["decode_allocation_policy"], "prefill_complete");
    assert_eq!(keys(&told).len(), E4.len() + 3);
}

#[test]
fn the_second_era_is_answered_with_its_own_names() {
    let view = View { dialect: Dialect::SecondEra, ..TOPOLOGY };
    let expected = json!({"prefill_attn_tp_size": 1, "prefill_dp_size": 1, "prefill_pp_size": 1, "prefill_page_size": 64});
    assert_eq!(answer(&body(1, 0), false, view), expected);
}

#[test]
fn an_unknown_rank_and_one_that_cannot_be_are_unknown() {
    let mut registry = registry();
    assert!(matches!(registry.endpoint(at_s(0.0), None), Err(LookupError::NotReady(_))));
    put(&mut registry, 0.0, &body(1, 0)).unwrap();
    assert_eq!(registry.endpoint(at_s(0.0), None), Err(LookupError::Unknown));
    assert_eq!(registry.endpoint(at_s(0.0), tp_at(1)), Err(LookupError::Unknown));
    assert_eq!(LookupError::Unknown.to_string(), "the engine has no such rank");
}

#[test]
fn two_registries_have_two_instances() {
    let other = Registry::new(&Options::DEFAULT, 8).stamp(at_s(0.0));
    assert_ne!(registry().stamp(at_s(0.0)).instance, other.instance);
}
