//! What a registry that is not ready says it waits for: an extension of ours in the body of a 503.

use alloc::format;
use alloc::string::String;

use serde_json::Value;

use super::object::{Fields, Object};
use crate::registry::NotReady;
use crate::topology::MAX_RANKS;

/// The first missing rank and how many more there are, as a clause: `waiting for tp3/pp1 and 2 more`.
///
/// None when the body does not say so (upstream's is plain text) or contradicts itself: it is a help for people, and
/// nothing depends on it.
#[must_use]
pub fn parse_not_ready(body: &[u8]) -> Option<String> {
    let object = Object::parse(body).ok()?;
    let fields = object.unique().ok()?;
    let registered = tree(&fields, NotReady::REGISTERED)?.as_u64()?;
    let sizes = tree(&fields, NotReady::SIZES)?;
    if sizes.is_null() && registered == 0 {
        return Some(String::from("no rank has registered"));
    }
    let sizes = coordinates(&sizes)?;
    let ranks = sizes.iter().try_fold(1_u64, |product, &size| product.checked_mul(size))?;
    let missing = tree(&fields, NotReady::MISSING)?;
    let first = coordinates(missing.as_array()?.first()?)?;
    let fits = first.iter().zip(&sizes).all(|(at, size)| at < size);
    if !fits || ranks > MAX_RANKS {
        return None;
    }
    let name = rank_name(first, sizes);
    match ranks.checked_sub(registered)? {
        0 => None,
        1 => Some(format!("waiting for {name}")),
        missing => Some(format!("waiting for {name} and {} more", missing - 1)),
    }
}

fn tree(fields: &Fields<'_>, key: &str) -> Option<Value> {
    fields.find(key)?.tree().ok()
}

/// dp, cp, tp, pp.
fn coordinates(value: &Value) -> Option<[u64; 4]> {
    let [dp, cp, tp, pp] = value.as_array()?.as_slice() else { return None };
    Some([dp.as_u64()?, cp.as_u64()?, tp.as_u64()?, pp.as_u64()?])
}

/// `tp3/pp1`: of all coordinates those that can differ, and always the TP rank.
fn rank_name(at: [u64; 4], sizes: [u64; 4]) -> String {
    let mut name = String::new();
    for ((axis, rank), size) in ["dp", "cp", "tp", "pp"].into_iter().zip(at).zip(sizes) {
        if size > 1 || axis == "tp" {
            let slash = if name.is_empty() { "" } else { "/" };
            name.push_str(&format!("{slash}{axis}{rank}"));
        }
    }
    name
}
