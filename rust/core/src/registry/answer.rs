//! The topology answer, for readers of every era.

use alloc::string::{String, ToString};

use serde_json::{Map, Value, json};

use super::generation::Generation;
use super::registration::DEFAULT_POLICY;
use super::route_query::Dialect;

/// Who reads a topology answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The query it used.
    pub dialect: Dialect,
    /// Whether it said that it knows every key (`X-Disagg-Client`).
    pub knows_newer_keys: bool,
}

/// `generation` as JSON text.
pub fn topology(generation: &Generation, view: View, old_decodes: bool) -> String {
    let answer = match view.dialect {
        Dialect::SecondEra => second_era(generation),
        Dialect::Current if old_decodes => {
            let mut answer = current(generation);
            answer.extend(newer(generation).into_iter().filter(is_told_to_old_decodes));
            answer
        }
        Dialect::Current if generation.has_newer_keys || view.knows_newer_keys => {
            let mut answer = current(generation);
            answer.extend(
                newer(generation)
                    .into_iter()
                    .filter(|(key, value)| !(value.is_null() && LEFT_OUT_WHEN_NULL.contains(&key.as_str()))),
            );
            answer
        }
        Dialect::Current => current(generation),
    };
    Value::Object(answer).to_string()
}

fn second_era(generation: &Generation) -> Map<String, Value> {
    let (layout, sizes) = (&generation.layout, generation.layout.sizes);
    object(json!({
        "prefill_attn_tp_size": sizes.tp,
        "prefill_dp_size": sizes.dp,
        "prefill_pp_size": sizes.pp,
        "prefill_page_size": layout.page_size,
    }))
}

fn current(generation: &Generation) -> Map<String, Value> {
    let (layout, sizes) = (&generation.layout, generation.layout.sizes);
    object(json!({
        "attn_tp_size": sizes.tp,
        "attn_cp_size": sizes.cp,
        "dp_size": sizes.dp,
        "pp_size": sizes.pp,
        "page_size": layout.page_size,
        "kv_cache_dtype": layout.kv_cache_dtype,
        "follow_bootstrap_room": layout.follow_bootstrap_room,
        // Fields of the reader's side that upstream sends too, always null; some readers want them.
        "target_tp_rank": null,
        "target_tp_ranks": null,
        "target_cp_ranks": null,
        "target_pp_ranks": null,
        "required_dst_info_num": null,
        "required_prefill_response_num": null,
    }))
}

/// The keys newer than era E4. `dynamic_dp_size` is in no release: only sent when it says something.
fn newer(generation: &Generation) -> Map<String, Value> {
    let layout = &generation.layout;
    object(json!({
        "enable_dsa_cache_layer_split": layout.enable_dsa_cache_layer_split,
        "enable_kv_cache_sharding": layout.enable_kv_cache_sharding,
        "decode_allocation_policy": layout.decode_allocation_policy,
        "prefill_http_port": generation.prefill_http_port,
        "kv_layout": layout.kv_layout,
        "dsv41_spec_layout": layout.dsv41_spec_layout,
        "dynamic_dp_size": layout.dynamic_dp_size.then_some(true),
    }))
}

fn is_told_to_old_decodes((key, value): &(String, Value)) -> bool {
    let is_default = match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => key == "decode_allocation_policy" && text == DEFAULT_POLICY,
        Value::Bool(true) | Value::Number(_) | Value::Array(_) | Value::Object(_) => false,
    };
    !is_default && key != "prefill_http_port"
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            unreachable!("called with object literals only")
        }
    }
}

const LEFT_OUT_WHEN_NULL: [&str; 3] = ["kv_layout", "dsv41_spec_layout", "dynamic_dp_size"];
