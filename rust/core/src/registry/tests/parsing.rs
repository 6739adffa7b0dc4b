//! What is refused, and that the reason names it.

use alloc::format;
use alloc::vec::Vec;

use super::*;

fn refused(body: &Value) -> BadInput {
    parse(body).unwrap_err()
}

#[test]
fn a_registration_of_every_field() {
    let body = with(body(8, 3), "rank_port", json!("02003"));
    let body = with(body, "page_size", json!("64"));
    let body = with(body, "prefill_http_port", json!("30000"));
    let body = with(body, "enable_dsa_cache_layer_split", json!("false"));
    let rank = rank(&with(body, "unknown", json!([1, 2])));
    assert_eq!(Some(rank.at), tp_at(3));
    assert_eq!((rank.endpoint.port, rank.prefill_http_port), (2003, Some(30000)));
    assert_eq!(rank.layout.page_size, Some(64));
    assert!(!rank.layout.enable_dsa_cache_layer_split);
    assert!(rank.layout.follow_bootstrap_room);
}

#[test]
fn a_second_era_registration_has_neither_cp_nor_must_it_have_a_page_size() {
    let mut body = with(body(2, 1), "role", json!("Prefill"));
    for field in ["attn_cp_size", "attn_cp_rank", "page_size", "kv_cache_dtype"] {
        body.as_object_mut().unwrap().remove(field);
    }
    let rank = rank(&body);
    assert_eq!((rank.layout.sizes.cp, rank.layout.page_size), (1, None));
    let decode = with(body, "role", json!("Decode"));
    assert_eq!(parse(&decode), Ok(Put::NotPrefill));
}

#[test]
fn every_required_field_is_missed_by_name() {
    let whole = body(1, 0);
    for field in whole.as_object().unwrap().keys() {
        let result = parse(&with(whole.clone(), field, Value::Null));
        match field.as_str() {
            "kv_cache_dtype" => assert!(result.is_ok()),
            _ => assert_eq!(result.unwrap_err().field(), Some(field.as_str())),
        }
    }
    assert_eq!(refused(&with(body(1, 0), "rank_ip", Value::Null)).to_string(), "rank_ip is missing");
}

#[test]
fn integers_are_integers_or_digits_and_nothing_else() {
    for text in
        ["8.0", "true", "-1", "\"+1\"", "\" 1\"", "\"1_0\"", "\"\"", "\"\u{660}\"", "[1]", "1e2", "-0"]
    {
        let body = body(1, 0).to_string().replace("\"page_size\":64", &format!("\"page_size\":{text}"));
        let why = Put::from_json(body.as_bytes()).unwrap_err();
        assert_eq!(why.field(), Some("page_size"), "{text}: {why}");
    }
    assert_eq!(
        refused(&with(body(1, 0), "page_size", json!(8.0))).to_string(),
        "page_size is 8.0: must be an integer, as such or in ASCII digits"
    );
}

#[test]
fn sizes_and_ranks_are_bounded() {
    let why = |field: &str, value: Value| refused(&with(body(2, 0), field, value)).to_string();
    assert_eq!(why("attn_tp_size", json!(0)), "attn_tp_size is 0: must be in 1..65535");
    assert_eq!(why("pp_size", json!(65_536)), "pp_size is 65536: must be in 1..65535");
    assert_eq!(why("attn_tp_rank", json!(2)), "attn_tp_rank is 2: must be below the size 2");
    assert_eq!(why("rank_port", json!(0)), "rank_port is 0: must be in 1..65535");
    assert_eq!(
        why("rank_port", json!("99999999999999999999")),
        "rank_port is \"99999999999999999999\": must be in 1..65535"
    );
    let many = with(body(65_535, 0), "pp_size", json!(2));
    assert_eq!(refused(&many).to_string(), "dp 1 x cp 1 x tp 65535 x pp 2 are more than 65536 ranks");
    assert_eq!(refused(&many).field(), None);
    let most = with(body(32_768, 0), "pp_size", json!(2));
    assert!(parse(&most).is_ok());
}

#[test]
fn texts_are_texts_of_a_sane_length() {
    for (field, value) in [
        ("rank_ip", json!(7)),
        ("rank_ip", json!("")),
        ("rank_ip", json!("10.0.0.1 ")),
        ("rank_ip", json!("a\r\nb")),
        ("rank_ip", json!("x".repeat(256))),
        ("kv_cache_dtype", json!(["bfloat16"])),
        ("kv_layout", json!(1)),
        ("decode_allocation_policy", json!(true)),
        ("enable_kv_cache_sharding", json!("yes")),
        ("dsv41_spec_layout", json!([1])),
        ("dsv41_spec_layout", json!({"a": "x".repeat(33_000)})),
    ] {
        let why = refused(&with(body(1, 0), field, value));
        assert_eq!(why.field(), Some(field));
        assert!(why.to_string().len() < 200, "{why}");
    }
}

#[test]
fn any_other_balancing_method_does_not_follow_the_room() {
    let follows = |value| rank(&with(body(1, 0), "load_balance_method", value)).layout.follow_bootstrap_room;
    assert!(follows(json!("follow_bootstrap_room")) && follows(Value::Null));
    for value in [json!(""), json!("auto"), json!("FOLLOW_BOOTSTRAP_ROOM"), json!(true)] {
        assert!(!follows(value));
    }
}

#[test]
fn what_is_not_a_json_object_is_refused() {
    for body in ["", "{", "x", "NaN", "{\"a\": Infinity}", "{} {}", "\u{feff}{}"] {
        let why = Put::from_json(body.as_bytes()).unwrap_err();
        assert!(matches!(why, BadInput::Json { .. }), "{body}: {why}");
    }
    for body in ["[]", "1", "\"x\"", "null"] {
        assert_eq!(Put::from_json(body.as_bytes()), Err(BadInput::NotAnObject));
    }
    assert!(Put::from_json(b"\x80\x04\x95.").is_err(), "a pickle is just bytes");
    assert!(Put::from_json("[".repeat(100_000).as_bytes()).is_err());
}

#[test]
fn a_key_that_stands_twice_is_refused_at_any_depth() {
    let whole = body(1, 0).to_string();
    let twice = whole.replacen('{', "{\"pp_rank\":0,", 1);
    let why = Put::from_json(twice.as_bytes()).unwrap_err().to_string();
    assert!(why.contains("key \"pp_rank\" stands twice"), "{why}");
    let nested = whole.replacen('{', "{\"dsv41_spec_layout\":{\"a\":1,\"a\":1},", 1);
    assert!(Put::from_json(nested.as_bytes()).is_err());
}

fn query(text: &str) -> Result<RouteQuery, BadInput> {
    let pairs: Vec<(&str, &str)> = text.split('&').filter_map(|pair| pair.split_once('=')).collect();
    RouteQuery::from_pairs(pairs.into_iter())
}

#[test]
fn both_dialects_are_told_apart() {
    let all = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    assert_eq!(query(all), Ok(RouteQuery::Topology(Dialect::Current)));
    let old = "engine_rank=-1&target_dp_group=-1&target_pp_rank=-1";
    assert_eq!(query(old), Ok(RouteQuery::Topology(Dialect::SecondEra)));
    let rank = |dp, cp, tp, pp| Ok(RouteQuery::Rank(Some(Coordinate { dp, cp, tp, pp })));
    assert_eq!(query("engine_rank=3&target_dp_group=1&target_pp_rank=2"), rank(1, 0, 3, 2));
    let current = "prefill_dp_rank=1&prefill_cp_rank=2&target_tp_rank=03&target_pp_rank=4&engine_rank=9&prefill_dp_rank=7";
    assert_eq!(query(current), rank(1, 2, 3, 4));
}

#[test]
fn a_rank_no_engine_can_have_is_asked_for_all_the_same() {
    for value in ["-1", "65536", "100000000000000000000"] {
        let text = format!("prefill_dp_rank={value}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0");
        assert_eq!(query(&text), Ok(RouteQuery::Rank(None)));
    }
}

#[test]
fn query_values_are_digits_or_minus_one() {
    for value in ["abc", "1.0", "-2", " 1", "+1", "1_0", "\u{660}", "--1"] {
        let text = format!("prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank={value}");
        assert_eq!(query(&text).unwrap_err().field(), Some("target_pp_rank"));
    }
    let why = query("prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0").unwrap_err();
    assert_eq!(why.to_string(), "prefill_dp_rank is \"x\": must be ASCII digits, or -1");
    for text in [
        "",
        "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1",
        "prefill_dp_rank=&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
        "engine_rank=0",
    ] {
        assert!(matches!(query(text), Err(BadInput::Missing { .. })), "{text}");
    }
}
