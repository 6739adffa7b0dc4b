use super::*;
use crate::topology::PrefillInfoSpec;
use alloc::format;
use alloc::string::ToString;
use alloc::vec;
use proptest::prelude::*;
use serde_json::json;

fn info(body: &str) -> PrefillInfoSpec {
    match parse_topology(body.as_bytes()).unwrap() {
        TopologyBody::Info(info) => info.spec().clone(),
        TopologyBody::NotReady => panic!("not ready: {body}"),
    }
}

fn refusal(body: &str) -> (String, String, ProtocolRule) {
    let error = parse_topology(body.as_bytes()).unwrap_err();
    (error.field, error.value, error.rule)
}

#[test]
fn a_march_2026_answer_has_the_defaults_of_what_it_does_not_say() {
    let spec = info(
        r#"{"attn_tp_size":4,"attn_cp_size":2,"dp_size":2,"pp_size":1,"page_size":64,
        "kv_cache_dtype":"auto","follow_bootstrap_room":false}"#,
    );
    let expected = PrefillInfoSpec {
        attn_tp_size: 4,
        attn_cp_size: 2,
        dp_size: 2,
        follow_bootstrap_room: false,
        ..Default::default()
    };
    assert_eq!(spec, expected);
}

#[test]
fn the_old_names_are_read_and_what_they_lack_is_unknown() {
    let spec = info(
        r#"{"prefill_attn_tp_size":"4","prefill_dp_size":2,"prefill_pp_size":3,"prefill_page_size":16}"#,
    );
    assert_eq!((spec.attn_tp_size, spec.attn_cp_size, spec.dp_size, spec.pp_size), (4, 1, 2, 3));
    assert_eq!((spec.page_size, spec.kv_cache_dtype), (Some(16), None));
}

#[test]
fn null_sizes_mean_not_ready() {
    let body = br#"{"prefill_attn_tp_size":null,"prefill_dp_size":null,"prefill_pp_size":null,"prefill_page_size":null}"#;
    assert_eq!(parse_topology(body), Ok(TopologyBody::NotReady));
}

#[test]
fn unknown_keys_are_kept_and_the_decode_side_s_are_ignored() {
    let spec = info(
        r#"{"attn_tp_size":1,"dp_size":1,"target_tp_ranks":[1,2],"required_dst_info_num":7,
        "future_field":{"a":[1,2.5,null]},"big":18446744073709551615}"#,
    );
    assert_eq!(spec.extras.len(), 2);
    assert_eq!(spec.extras["future_field"], json!({"a": [1, 2.5, null]}));
    assert_eq!(spec.extras["big"], json!(u64::MAX));
}

#[test]
fn integers_are_ascii_digits_and_nothing_else() {
    let rule = ProtocolRule::NotAnInteger;
    for value in
        ["-2", "8.0", "1e2", "true", "\"+8\"", "\" 8\"", "\"1_0\"", "\"\"", "\"٣\"", "[1]", "\"8.0\"", "-0"]
    {
        let body = format!(r#"{{"attn_tp_size":{value},"dp_size":1}}"#);
        assert_eq!(refusal(&body), ("attn_tp_size".into(), value.into(), rule));
    }
    assert_eq!(info(r#"{"attn_tp_size":"008","dp_size":"\u0031"}"#).attn_tp_size, 8);
}

#[test]
fn absurd_sizes_are_refused_with_the_exact_value() {
    let rule = ProtocolRule::OutOfRange { min: 1, max: 65_535 };
    for value in ["0", "1099511627776", "100000000000000000000000001"] {
        let body = format!(r#"{{"attn_tp_size":{value},"dp_size":1}}"#);
        assert_eq!(refusal(&body), ("attn_tp_size".into(), value.into(), rule));
    }
    let (field, value, _) = refusal(r#"{"attn_tp_size":65535,"dp_size":2}"#);
    assert_eq!((field.as_str(), value.as_str()), ("sizes", "131070"));
}

#[test]
fn booleans_are_read_right_in_their_three_spellings() {
    for (text, expected) in
        [("\"false\"", false), ("0", false), ("false", false), ("\"true\"", true), ("1", true)]
    {
        let body = format!(r#"{{"attn_tp_size":1,"dp_size":1,"follow_bootstrap_room":{text}}}"#);
        assert_eq!(info(&body).follow_bootstrap_room, expected);
    }
    for text in ["2", "\"1\"", "\"True\"", "1.0", "[]"] {
        let body = format!(r#"{{"attn_tp_size":1,"dp_size":1,"dynamic_dp_size":{text}}}"#);
        assert_eq!(refusal(&body).2, ProtocolRule::NotABoolean);
    }
}

#[test]
fn a_key_that_stands_twice_is_refused_at_every_depth() {
    let top = refusal(r#"{"attn_tp_size":1,"dp_size":1,"attn_tp_size":1}"#);
    assert_eq!(top, ("attn_tp_size".into(), "1".into(), ProtocolRule::DuplicateKey));
    let nested = refusal(r#"{"attn_tp_size":1,"dp_size":1,"x":[{"a":1,"a":1}]}"#);
    assert_eq!((nested.0.as_str(), nested.2), ("x", ProtocolRule::DuplicateKey));
}

#[test]
fn eras_without_attention_sizes_are_refused_by_name() {
    for body in [r#"{"prefill_tp_size":8,"prefill_dp_size":1}"#, r#"{"prefill_dp_size":1}"#] {
        assert_eq!(refusal(body).0, "era");
    }
    assert_eq!(refusal(r#"{"dp_size":1}"#).2, ProtocolRule::Missing);
}

#[test]
fn one_size_under_two_names_must_agree() {
    assert_eq!(info(r#"{"attn_tp_size":2,"dp_size":1,"prefill_dp_size":1}"#).dp_size, 1);
    let (field, _, rule) = refusal(r#"{"attn_tp_size":2,"dp_size":1,"prefill_dp_size":2}"#);
    assert_eq!((field.as_str(), rule), ("prefill_dp_size", ProtocolRule::TwoNames));
}

#[test]
fn an_absent_policy_is_early_and_a_null_one_unknown() {
    assert_eq!(info(r#"{"attn_tp_size":1,"dp_size":1}"#).decode_allocation_policy.as_deref(), Some("early"));
    let spec = info(r#"{"attn_tp_size":1,"dp_size":1,"decode_allocation_policy":null}"#);
    assert_eq!(spec.decode_allocation_policy, None);
}

#[test]
fn what_is_not_a_json_object_is_a_fault_of_the_body() {
    for body in ["", "<html>", "[]", "null", "{", r#"{"attn_tp_size":1,"dp_size":1} x"#, "\u{feff}{}"] {
        assert_eq!(refusal(body).0, "body");
    }
    assert_eq!(parse_topology(b"\xff{}").unwrap_err().value, "\u{fffd}{}");
}

#[test]
fn nesting_is_bounded() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let body = format!(r#"{{"attn_tp_size":1,"dp_size":1,"x":{deep}}}"#);
    assert_eq!(refusal(&body).0, "x");
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(parse_dp_ranks(format!(r#"{{"1":{deep}}}"#).as_bytes()).unwrap()[0].1.is_err());
}

#[test]
fn an_endpoint_is_a_host_and_a_port() {
    for host in ["10.0.0.1", "fe80::1%eth0", "::1", "node-1.cluster_a.local", "a."] {
        let body = format!(r#"{{"rank_ip":"{host}","rank_port":"123","agent":[{{}}]}}"#);
        let expected = RankEndpoint { ip: host.into(), port: 123 };
        assert_eq!(parse_endpoint(body.as_bytes()), Ok(expected));
    }
    let long = "a".repeat(64);
    for host in [
        "",
        "a b",
        "a/b",
        "a:1",
        "[::1]",
        "1.2.3",
        "999.1.1.1",
        "a..b",
        "-a",
        "a-.b",
        "::1%",
        "1.2.3.4%x",
        &long,
    ] {
        let body = format!(r#"{{"rank_ip":"{host}","rank_port":1}}"#);
        assert_eq!(parse_endpoint(body.as_bytes()).unwrap_err().field, "rank_ip");
    }
    for port in ["0", "65536", "-1", "null", "1.0"] {
        let body = format!(r#"{{"rank_ip":"a","rank_port":{port}}}"#);
        assert_eq!(parse_endpoint(body.as_bytes()).unwrap_err().field, "rank_port");
    }
}

#[test]
fn one_malformed_entry_concerns_only_its_room() {
    let body =
        br#"{"9223372036854775807":3,"1":-1,"2":"4","03":1,"9223372036854775808":1,"x":1,"5":1,"5":1}"#;
    let rooms = parse_dp_ranks(body).unwrap();
    let seen: Vec<_> = rooms.iter().map(|(room, rank)| (*room, rank.clone().ok())).collect();
    assert_eq!(seen, vec![(1, None), (2, Some(4)), (5, None), (MAX_ROOM, Some(3))]);
    assert_eq!(
        rooms[0].1.as_ref().unwrap_err().to_string(),
        "1 -1: must be an integer or a string of ascii digits"
    );
    assert_eq!(parse_dp_ranks(b"[]").unwrap_err().field, "body");
}

proptest! {
    #[test]
    fn no_bytes_make_a_parser_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = (parse_topology(&body), parse_endpoint(&body), parse_dp_ranks(&body));
    }

    #[test]
    fn no_mutation_of_a_real_answer_makes_a_parser_panic(at in 0_usize..400, byte in any::<u8>(), cut in 0_usize..400) {
        let mut body = br#"{"attn_tp_size":4,"attn_cp_size":1,"dp_size":2,"pp_size":1,"page_size":64,"kv_cache_dtype":"\u00e9",
            "follow_bootstrap_room":true,"dsv41_spec_layout":{"a":[1,2]},"rank_ip":"a","rank_port":1,"7":3}"#.to_vec();
        if let Some(slot) = body.get_mut(at) {
            *slot = byte;
        }
        body.truncate(cut);
        let _ = (parse_topology(&body), parse_endpoint(&body), parse_dp_ranks(&body));
    }

    /// Law: rooms come out exactly as they went in, up to 2^63 - 1.
    #[test]
    fn rooms_survive_exactly(rooms in proptest::collection::btree_map(0_u64..=MAX_ROOM, any::<u32>(), 0..20)) {
        let read = parse_dp_ranks(serde_json::to_string(&rooms).unwrap().as_bytes()).unwrap();
        prop_assert_eq!(read, rooms.into_iter().map(|(room, rank)| (room, Ok(rank))).collect::<Vec<_>>());
    }
}

#[test]
fn a_503_says_which_rank_is_missing_and_how_many_more() {
    let clause = |body: &str| parse_not_ready(body.as_bytes());
    let body =
        r#"{"error":"...","sizes":[1,1,4,2],"registered":5,"missing":[[0,0,3,1],[0,0,2,0],[0,0,2,1]]}"#;
    assert_eq!(clause(body).unwrap(), "waiting for tp3/pp1 and 2 more");
    let last = r#"{"sizes":[2,1,1,1],"registered":1,"missing":[[1,0,0,0]]}"#;
    assert_eq!(clause(last).unwrap(), "waiting for dp1/tp0");
    let none = r#"{"sizes":null,"registered":0,"missing":[]}"#;
    assert_eq!(clause(none).unwrap(), "no rank has registered");
}

#[test]
fn a_503_that_contradicts_itself_says_nothing() {
    for body in [
        "Prefill server not fully registered yet",
        "{}",
        r#"{"sizes":[1,1,4,2],"registered":8,"missing":[[0,0,3,1]]}"#,
        r#"{"sizes":[1,1,4,2],"registered":9,"missing":[[0,0,3,1]]}"#,
        r#"{"sizes":[1,1,4,2],"registered":5,"missing":[]}"#,
        r#"{"sizes":[1,1,4,2],"registered":5,"missing":[[0,0,4,0]]}"#,
        r#"{"sizes":[1,1,4],"registered":1,"missing":[[0,0,3]]}"#,
        r#"{"sizes":[65535,65535,65535,65535],"registered":1,"missing":[[0,0,3,0]]}"#,
        r#"{"sizes":[1,1,"\u001b[2J",2],"registered":1,"missing":[[0,0,0,1]]}"#,
        r#"{"sizes":null,"registered":3,"missing":[]}"#,
        r#"{"sizes":[0,1,1,1],"registered":0,"missing":[[0,0,0,0]]}"#,
    ] {
        assert_eq!(parse_not_ready(body.as_bytes()), None, "{body}");
    }
}

#[test]
fn table_gives_topology_and_the_endpoint_of_each_rank() {
    let rank = |tp: u32| {
        format!(
            r#"{{"dp":1,"cp":0,"tp":"{tp}","pp":0,"rank_ip":"10.0.0.{tp}","rank_port":{},"new":[]}}"#,
            9000 + tp
        )
    };
    let body = format!(
        r#"{{"instance_id":"a","epoch":"7","topology":{{"attn_tp_size":2,"dp_size":2}},"ranks":[{},{}],"new":1}}"#,
        rank(1),
        rank(0)
    );
    let table = parse_table(body.as_bytes()).unwrap();
    assert_eq!((table.instance.as_deref(), table.epoch.as_deref()), (Some("a"), Some("7")));
    assert_eq!((table.info.attn_tp_size(), table.info.dp_size()), (2, 2));
    assert_eq!(table.find((1, 0, 1, 0)).map(|rank| rank.port), Some(9001));
    assert_eq!(table.find((1, 0, 2, 0)), None);
    assert_eq!(table.find((0, 0, 1, 0)), None);
}

#[test]
fn table_is_refused_with_the_field_that_is_wrong() {
    let topology = r#""topology":{"attn_tp_size":1,"dp_size":1}"#;
    let rank = r#"{"dp":0,"cp":0,"tp":0,"pp":0,"rank_ip":"a","rank_port":1}"#;
    for (body, field) in [
        (String::from("[]"), "body"),
        (format!("{{{topology}}}"), "ranks"),
        (format!(r#"{{"ranks":[{rank}]}}"#), "topology"),
        (format!(r#"{{"topology":null,"ranks":[{rank}]}}"#), "topology"),
        (format!(r#"{{"topology":{{"attn_tp_size":null,"dp_size":1}},"ranks":[{rank}]}}"#), "topology"),
        (format!(r#"{{"topology":{{"attn_tp_size":0,"dp_size":1}},"ranks":[{rank}]}}"#), "attn_tp_size"),
        (format!(r#"{{{topology},"ranks":{rank}}}"#), "ranks"),
        (format!(r#"{{{topology},"ranks":[7]}}"#), "ranks"),
        (format!(r#"{{{topology},"ranks":[{rank},{rank}]}}"#), "ranks"),
        (format!(r#"{{{topology},"ranks":[{}]}}"#, rank.replace(r#""tp":0"#, r#""tp":-1"#)), "tp"),
        (format!(r#"{{{topology},"ranks":[{}]}}"#, rank.replace(r#""pp":0,"#, "")), "pp"),
        (format!(r#"{{{topology},"ranks":[{}]}}"#, rank.replace(r#""a""#, r#""a b""#)), "rank_ip"),
        (format!(r#"{{{topology},"ranks":[{rank}],"epoch":7}}"#), "epoch"),
    ] {
        assert_eq!(parse_table(body.as_bytes()).unwrap_err().field, field, "{body}");
    }
}
