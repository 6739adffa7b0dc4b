//! The body of `PUT /route`, strictly read.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::string::String;

use serde_json::Value;

use super::fields::{Fields, refused};
use super::generation::Endpoint;
use super::layout::{Coordinate, Layout, Sizes};
use super::refusal::BadInput;

/// What a `PUT /route` asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Put {
    /// One rank of a prefill engine.
    Rank(Box<Registration>),
    /// A decode of the second era; upstream answers OK and keeps nothing.
    NotPrefill,
}

/// One rank of a prefill engine, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration {
    /// Where it stands; below the sizes.
    pub at: Coordinate,
    /// Where it listens.
    pub endpoint: Endpoint,
    /// What it says about the engine.
    pub layout: Layout,
    /// Port of the prefill's HTTP API.
    pub prefill_http_port: Option<u16>,
    /// Whether it sent a key that decodes before 0.5.20 or so do not know.
    pub has_newer_keys: bool,
}

impl Put {
    /// Reads a body.
    ///
    /// # Errors
    /// [`BadInput`] for anything that is not a registration of WIRE eras E2 to E7.
    pub fn from_json(body: &[u8]) -> Result<Self, BadInput> {
        let fields = Fields::from_json(body)?;
        // Only the second era has a role; it has no CP, and its first half no page size.
        let role = fields.optional_text("role")?;
        if role.as_deref().is_some_and(|role| role != "Prefill") {
            return Ok(Self::NotPrefill);
        }
        let is_second_era = role.is_some();
        let (sizes, at) = position(&fields, is_second_era)?;
        Ok(Self::Rank(Box::new(Registration {
            at,
            endpoint: endpoint(&fields)?,
            layout: layout(&fields, sizes, is_second_era)?,
            prefill_http_port: optional(&fields, "prefill_http_port", 1)?,
            has_newer_keys: NEWER_KEYS.iter().any(|key| fields.value(key).is_some()),
        })))
    }
}

fn position(fields: &Fields, is_second_era: bool) -> Result<(Sizes, Coordinate), BadInput> {
    let tp = Axis::read(fields, "attn_tp_size", "attn_tp_rank")?;
    let attention = Axis::read(fields, "attn_dp_size", "attn_dp_rank")?;
    let pp = Axis::read(fields, "pp_size", "pp_rank")?;
    let system = Axis::read(fields, "system_dp_size", "system_dp_rank")?;
    let cp = if is_second_era && fields.value("attn_cp_size").is_none() {
        Axis::ONE
    } else {
        Axis::read(fields, "attn_cp_size", "attn_cp_rank")?
    };
    // With DP attention the system has one group, whose rank field then counts attention groups.
    let dp = if system.size == 1 { attention } else { system };
    let sizes = Sizes { dp: dp.size, cp: cp.size, tp: tp.size, pp: pp.size }.checked()?;
    let at = Coordinate { dp: dp.rank()?, cp: cp.rank()?, tp: tp.rank()?, pp: pp.rank()? };
    Ok((sizes, at))
}

fn endpoint(fields: &Fields) -> Result<Endpoint, BadInput> {
    let field = "rank_ip";
    let ip = fields.optional_text(field)?.ok_or(BadInput::Missing { field })?;
    if ip.is_empty() || ip.chars().any(char::is_whitespace) {
        let rule = "must be an address without blanks";
        return Err(refused(field, &Value::String(ip), rule));
    }
    let port = narrow(fields.integer("rank_port", 1, u64::from(u16::MAX))?);
    Ok(Endpoint { ip, port })
}

fn layout(fields: &Fields, sizes: Sizes, is_second_era: bool) -> Result<Layout, BadInput> {
    let page_size = fields.optional_integer("page_size", 1, u64::from(u32::MAX))?;
    if page_size.is_none() && !is_second_era {
        return Err(BadInput::Missing { field: "page_size" });
    }
    Ok(Layout {
        sizes,
        page_size: page_size.map(|size| u32::try_from(size).unwrap_or(u32::MAX)),
        kv_cache_dtype: fields.optional_text("kv_cache_dtype")?,
        kv_layout: fields.optional_text("kv_layout")?,
        // Whatever is not this text is another method, as upstream reads it.
        follow_bootstrap_room: fields
            .value("load_balance_method")
            .is_none_or(|method| method.as_str() == Some("follow_bootstrap_room")),
        enable_dsa_cache_layer_split: fields.flag("enable_dsa_cache_layer_split")?,
        enable_kv_cache_sharding: fields.flag("enable_kv_cache_sharding")?,
        dynamic_dp_size: fields.flag("dynamic_dp_size")?,
        decode_allocation_policy: fields
            .optional_text("decode_allocation_policy")?
            .unwrap_or_else(|| DEFAULT_POLICY.to_owned()),
        dsv41_spec_layout: spec_layout(fields)?,
    })
}

fn spec_layout(fields: &Fields) -> Result<Option<Value>, BadInput> {
    let field = "dsv41_spec_layout";
    let Some(value) = fields.value(field) else {
        return Ok(None);
    };
    let text: String = serde_json::to_string(value).unwrap_or_default();
    if !value.is_object() || text.len() > MAX_SPEC_LAYOUT {
        return Err(refused(field, value, "must be an object of at most 32 KiB"));
    }
    Ok(Some(value.clone()))
}

fn optional(fields: &Fields, field: &'static str, min: u64) -> Result<Option<u16>, BadInput> {
    let value = fields.optional_integer(field, min, u64::from(u16::MAX))?;
    Ok(value.map(narrow))
}

/// One of the parallel dimensions, as stated.
#[derive(Clone, Copy)]
struct Axis {
    size: u16,
    rank: u64,
    rank_field: &'static str,
}

impl Axis {
    const ONE: Self = Self { size: 1, rank: 0, rank_field: "attn_cp_rank" };

    fn read(fields: &Fields, size_field: &'static str, rank_field: &'static str) -> Result<Self, BadInput> {
        Ok(Self {
            size: narrow(fields.integer(size_field, 1, u64::from(u16::MAX))?),
            rank: fields.integer(rank_field, 0, u64::MAX)?,
            rank_field,
        })
    }

    /// The rank, checked: the rank of a dimension that does not count may be anything.
    fn rank(self) -> Result<u16, BadInput> {
        match u16::try_from(self.rank) {
            Ok(rank) if rank < self.size => Ok(rank),
            _ => Err(BadInput::RankNotBelowSize {
                field: self.rank_field,
                rank: self.rank,
                size: u64::from(self.size),
            }),
        }
    }
}

/// `value` was checked to fit.
fn narrow(value: u64) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

/// What a decode assumes when no policy is stated.
pub const DEFAULT_POLICY: &str = "early";

/// Keys of eras E5 and later.
const NEWER_KEYS: [&str; 7] = [
    "enable_dsa_cache_layer_split",
    "prefill_http_port",
    "dsv41_spec_layout",
    "dynamic_dp_size",
    "kv_layout",
    "enable_kv_cache_sharding",
    "decode_allocation_policy",
];

/// Half of what our client reads of a topology answer.
const MAX_SPEC_LAYOUT: usize = 32 * 1024;
