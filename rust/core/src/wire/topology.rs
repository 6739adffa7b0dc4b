//! The topology answer, E2 to E7 and on.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};

use serde_json::Value;

use super::TopologyBody;
use super::object::{Fields, Raw};
use crate::error::{InvalidValue, ProtocolError, ProtocolRule};
use crate::topology::{EARLY, MAX_SIZE, PrefillInfo, PrefillInfoSpec};

/// What the fields say; the sizes first, as a null size ends the reading.
pub(super) fn read(fields: &Fields<'_>) -> Result<TopologyBody, ProtocolError> {
    refuse_dead_eras(fields)?;
    let attn_tp_size = size(fields, ATTN_TP)?.present(ATTN_TP)?;
    let attn_cp_size = size(fields, ATTN_CP)?;
    let dp_size = size(fields, DP)?.present(DP)?;
    let pp_size = size(fields, PP)?;
    let (Some(attn_tp_size), Some(attn_cp_size), Some(dp_size), Some(pp_size)) =
        (attn_tp_size.known(), attn_cp_size.known(), dp_size.known(), pp_size.known())
    else {
        return Ok(TopologyBody::NotReady);
    };
    let flag = |key, default| fields.stated(key).map_or(Ok(default), Raw::boolean);
    let spec = PrefillInfoSpec {
        attn_tp_size,
        attn_cp_size,
        dp_size,
        pp_size,
        page_size: page_size(fields)?,
        kv_cache_dtype: name(fields, "kv_cache_dtype")?,
        follow_bootstrap_room: flag("follow_bootstrap_room", true)?,
        enable_dsa_cache_layer_split: flag("enable_dsa_cache_layer_split", false)?,
        enable_kv_cache_sharding: flag("enable_kv_cache_sharding", false)?,
        prefill_http_port: http_port(fields)?,
        kv_layout: name(fields, "kv_layout")?,
        decode_allocation_policy: policy(fields)?,
        dynamic_dp_size: flag("dynamic_dp_size", false)?,
        spec_layout: spec_layout(fields)?,
        extras: extras(fields)?,
    };
    let info = PrefillInfo::new(spec).map_err(too_many)?;
    Ok(TopologyBody::Info(Box::new(info)))
}

/// E0 knew no sizes but dp, E1 a `prefill_tp_size` that is not the attention-TP size.
fn refuse_dead_eras(fields: &Fields<'_>) -> Result<(), ProtocolError> {
    if fields.find(ATTN_TP.new).or(fields.find("prefill_attn_tp_size")).is_some() {
        return Ok(());
    }
    match fields.find("prefill_tp_size").or(fields.find("prefill_dp_size")) {
        None => Ok(()),
        Some(raw) => Err(ProtocolError::new("era", raw.key, ProtocolRule::Era)),
    }
}

/// A size's name from E3 on and, where E2 had one, its old name.
#[derive(Clone, Copy)]
struct SizeName {
    new: &'static str,
    old: Option<&'static str>,
}

/// What an answer says about one size.
#[derive(Clone, Copy)]
enum Size {
    Absent,
    Null,
    Known(u32),
}

impl Size {
    fn present(self, name: SizeName) -> Result<Self, ProtocolError> {
        match self {
            Self::Absent => Err(ProtocolError::new(name.new, "", ProtocolRule::Missing)),
            Self::Null | Self::Known(_) => Ok(self),
        }
    }

    /// An absent size is 1: the eras without it had no such ranks.
    fn known(self) -> Option<u32> {
        match self {
            Self::Absent => Some(1),
            Self::Null => None,
            Self::Known(size) => Some(size),
        }
    }
}

fn size(fields: &Fields<'_>, name: SizeName) -> Result<Size, ProtocolError> {
    match either_name(fields, name, MAX_SIZE)? {
        Some(size) => Ok(Size::Known(size)),
        None if is_mentioned(fields, name) => Ok(Size::Null),
        None => Ok(Size::Absent),
    }
}

fn page_size(fields: &Fields<'_>) -> Result<Option<u32>, ProtocolError> {
    either_name(fields, PAGE, u32::MAX)
}

/// The number under its new or its old name; `None` when neither states one.
fn either_name(fields: &Fields<'_>, name: SizeName, max: u32) -> Result<Option<u32>, ProtocolError> {
    let old = name.old.and_then(|key| fields.stated(key));
    let new = fields.stated(name.new).map(|raw| number(raw, max)).transpose()?;
    let Some(raw) = old else { return Ok(new) };
    let value = number(raw, max)?;
    if new.is_some_and(|other| other != value) {
        return Err(raw.refused(ProtocolRule::TwoNames));
    }
    Ok(Some(value))
}

fn is_mentioned(fields: &Fields<'_>, name: SizeName) -> bool {
    fields.find(name.new).is_some() || name.old.and_then(|key| fields.find(key)).is_some()
}

fn number(raw: Raw<'_>, max: u32) -> Result<u32, ProtocolError> {
    let number = raw.integer(1, u64::from(max))?;
    u32::try_from(number).map_err(|_| raw.refused(ProtocolRule::NotAnInteger))
}

fn http_port(fields: &Fields<'_>) -> Result<Option<u16>, ProtocolError> {
    let Some(raw) = fields.stated("prefill_http_port") else {
        return Ok(None);
    };
    let number = raw.integer(1, u64::from(u16::MAX))?;
    u16::try_from(number).map(Some).map_err(|_| raw.refused(ProtocolRule::NotAnInteger))
}

fn name(fields: &Fields<'_>, key: &str) -> Result<Option<String>, ProtocolError> {
    let Some(raw) = fields.stated(key) else {
        return Ok(None);
    };
    let text = raw.string()?;
    text.map(|text| Some(text.into_owned())).ok_or_else(|| raw.refused(ProtocolRule::NotAString))
}

/// A server that leaves the policy out means the default (WIRE.md E7, and `old_decodes`); null says nothing.
fn policy(fields: &Fields<'_>) -> Result<Option<String>, ProtocolError> {
    if fields.find(POLICY).is_none() {
        return Ok(Some(EARLY.to_string()));
    }
    name(fields, POLICY)
}

fn spec_layout(fields: &Fields<'_>) -> Result<Option<Value>, ProtocolError> {
    let Some(raw) = fields.stated(SPEC_LAYOUT) else {
        return Ok(None);
    };
    let tree = raw.tree()?;
    if tree.is_object() {
        return Ok(Some(tree));
    }
    Err(raw.refused(ProtocolRule::NotAnObjectOrNull))
}

fn extras(fields: &Fields<'_>) -> Result<BTreeMap<String, Value>, ProtocolError> {
    fields
        .iter()
        .filter(|raw| !KNOWN.contains(&raw.key) && !IGNORED.contains(&raw.key))
        .map(|raw| Ok((raw.key.to_string(), raw.tree()?)))
        .collect()
}

fn too_many(error: InvalidValue) -> ProtocolError {
    match error {
        InvalidValue::TooManyRanks { ranks, max } => {
            ProtocolError::new("sizes", &ranks.to_string(), ProtocolRule::TooManyRanks { max })
        }
        InvalidValue::OutOfRange { field, value, min, max } => {
            ProtocolError::new(field, &value.to_string(), ProtocolRule::OutOfRange { min, max })
        }
        InvalidValue::RankNotBelowSize { field, rank, .. } => {
            ProtocolError::new(field, &rank.to_string(), ProtocolRule::NotAnInteger)
        }
    }
}

const ATTN_TP: SizeName = SizeName { new: "attn_tp_size", old: Some("prefill_attn_tp_size") };
const ATTN_CP: SizeName = SizeName { new: "attn_cp_size", old: None };
const DP: SizeName = SizeName { new: "dp_size", old: Some("prefill_dp_size") };
const PP: SizeName = SizeName { new: "pp_size", old: Some("prefill_pp_size") };
const PAGE: SizeName = SizeName { new: "page_size", old: Some("prefill_page_size") };
const POLICY: &str = "decode_allocation_policy";
const SPEC_LAYOUT: &str = "dsv41_spec_layout";

const KNOWN: [&str; 18] = [
    "attn_tp_size",
    "prefill_attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "prefill_dp_size",
    "pp_size",
    "prefill_pp_size",
    "page_size",
    "prefill_page_size",
    "kv_cache_dtype",
    "follow_bootstrap_room",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    "prefill_http_port",
    "kv_layout",
    "dynamic_dp_size",
    POLICY,
    SPEC_LAYOUT,
];

/// The decode side's own fields, which E4 servers and later send by mistake.
const IGNORED: [&str; 6] = [
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
];
