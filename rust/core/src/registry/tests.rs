//! Shared helpers; the tests themselves are grouped by subject.

mod answers;
mod generations;
mod parsing;
mod properties;
mod rooms;

use alloc::string::{String, ToString};
use core::time::Duration;

use serde_json::{Value, json};

use super::*;

pub const TOPOLOGY: View = View { dialect: Dialect::Current, knows_newer_keys: false };

pub fn registry() -> Registry {
    Registry::new(&Options::DEFAULT, 7)
}

pub fn at_s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A registration of era E3 in a tp x 1 x 1 x 1 engine; its port tells the ranks apart.
pub fn body(tp: u16, rank: u16) -> Value {
    json!({
        "attn_tp_size": tp, "attn_tp_rank": rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": 2000 + rank,
        "page_size": 64, "kv_cache_dtype": "bfloat16",
    })
}

pub fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

pub fn parse(body: &Value) -> Result<Put, BadInput> {
    Put::from_json(body.to_string().as_bytes())
}

pub fn rank(body: &Value) -> Registration {
    match parse(body) {
        Ok(Put::Rank(rank)) => *rank,
        other => panic!("{other:?}"),
    }
}

pub fn put(registry: &mut Registry, seconds: f64, body: &Value) -> Result<(), Conflict> {
    registry.on_register(at_s(seconds), rank(body))
}

pub fn tp_at(tp: u16) -> Option<Coordinate> {
    Some(Coordinate { dp: 0, cp: 0, tp, pp: 0 })
}

/// The topology now, as JSON, or the text of why not.
pub fn topology(registry: &mut Registry, seconds: f64) -> Result<Value, String> {
    match registry.topology(at_s(seconds), TOPOLOGY) {
        Ok(text) => Ok(serde_json::from_str(&text).unwrap()),
        Err(why) => Err(why.to_string()),
    }
}

pub fn tp_size(registry: &mut Registry, seconds: f64) -> Option<u64> {
    topology(registry, seconds).ok().map(|answer| answer["attn_tp_size"].as_u64().unwrap())
}

pub fn port(registry: &mut Registry, seconds: f64, tp: u16) -> Option<u16> {
    registry.endpoint(at_s(seconds), tp_at(tp)).ok().map(|endpoint| endpoint.port)
}

pub fn epoch(registry: &mut Registry, seconds: f64) -> u64 {
    registry.stamp(at_s(seconds)).epoch
}

/// A registry in which a whole tp engine has registered at 0 s.
pub fn serving(tp: u16) -> Registry {
    let mut registry = registry();
    for rank in 0..tp {
        put(&mut registry, 0.0, &body(tp, rank)).unwrap();
    }
    assert_eq!(tp_size(&mut registry, 0.0), Some(u64::from(tp)));
    registry
}
