//! Whether one decode rank can read from one prefill engine: all differences at once, each with both values.
//!
//! The differences are visited as borrowed values, so that the question "is there a fatal one" allocates nothing.

use alloc::string::ToString;
use alloc::vec::Vec;

use serde_json::Value;

use crate::rank_mapping::{count_contacts, is_tp_sharded, kv_head_range};
use crate::topology::{DecodeRank, KvKind, PREFILL_COMPLETE, PrefillInfo};

mod reason;

pub use reason::{Incompatible, Reason, ReasonKind, Severity, Side};

/// All differences of the pair, fatal ones and warnings, in the order of [`ReasonKind::ALL`].
#[must_use]
pub fn check(decode: &DecodeRank, prefill: &PrefillInfo) -> Vec<Reason> {
    let mut reasons = Vec::new();
    visit(decode, prefill, &mut |kind, severity, local, remote| {
        reasons.push(Reason { kind, severity, local: local.to_side(), remote: remote.to_side() });
    });
    reasons
}

/// Whether the pair has no fatal difference; allocates nothing.
#[must_use]
pub fn is_compatible(decode: &DecodeRank, prefill: &PrefillInfo) -> bool {
    let mut compatible = true;
    visit(decode, prefill, &mut |_, severity, _, _| {
        compatible &= severity == Severity::Warning;
    });
    compatible
}

/// Nothing if the pair has no fatal difference; allocates nothing then.
///
/// # Errors
/// [`Incompatible`] with all differences, warnings too.
pub fn refuse_incompatible(decode: &DecodeRank, prefill: &PrefillInfo) -> Result<(), Incompatible> {
    if is_compatible(decode, prefill) {
        return Ok(());
    }
    Err(Incompatible { reasons: check(decode, prefill) })
}

/// One dtype for its spellings on the wire: the command line's, and the resolved one with or without its module.
#[must_use]
pub fn canonical_dtype(name: &str) -> &str {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "fp8_e4m3" => "float8_e4m3fn",
        "fp8_e5m2" => "float8_e5m2",
        "bf16" => "bfloat16",
        "fp16" | "half" => "float16",
        other => other,
    }
}

/// The greatest number of prefill ranks that one decode rank contacts.
pub const MAX_CONTACTS: u64 = 4_096;

/// Takes one difference in: what, how bad, the decode side's value, the prefill side's.
type Report<'r, 'a> = &'r mut dyn FnMut(ReasonKind, Severity, View<'a>, View<'a>);

fn visit<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    visit_cache(decode, prefill, report);
    visit_policy(decode, prefill, report);
    visit_tp(decode, prefill, report);
    visit_other_sizes(decode, prefill, report);
    visit_dcp(decode, prefill, report);
    let contacts = count_contacts(decode, prefill);
    if contacts > MAX_CONTACTS {
        report(ReasonKind::Contacts, Severity::Fatal, View::Absent, View::Count(contacts));
    }
}

fn visit_cache<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    let (ours, theirs) = (decode.spec(), prefill.spec());
    if let (Some(local), Some(remote)) = (ours.page_size, theirs.page_size)
        && local != remote
    {
        let (local, remote) = (View::Number(local), View::Number(remote));
        report(ReasonKind::PageSize, Severity::Fatal, local, remote);
    }
    if let (Some(local), Some(remote)) = (&ours.kv_cache_dtype, &theirs.kv_cache_dtype)
        && let Some(severity) = dtype_severity(local, remote, ours.strict_dtype)
    {
        let (local, remote) = (View::Text(local), View::Text(remote));
        report(ReasonKind::KvCacheDtype, severity, local, remote);
    }
    if let (Some(local), Some(remote)) = (&ours.kv_layout, &theirs.kv_layout)
        && local != remote
    {
        let (local, remote) = (View::Text(local), View::Text(remote));
        report(ReasonKind::KvLayout, Severity::Fatal, local, remote);
    }
}

fn visit_policy<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    let (ours, theirs) = (decode.spec(), prefill.spec());
    let local = ours.decode_allocation_policy.as_deref();
    let remote = theirs.decode_allocation_policy.as_deref();
    if local.is_some() && remote.is_some() && local != remote {
        let (local, remote) = (View::text(local), View::text(remote));
        report(ReasonKind::DecodeAllocationPolicy, Severity::Fatal, local, remote);
    }
    if ours.spec_layout != theirs.spec_layout {
        let (local, remote) = (View::json(&ours.spec_layout), View::json(&theirs.spec_layout));
        report(ReasonKind::SpecLayout, Severity::Fatal, local, remote);
    }
    // Either side's word is enough: a decode that states no policy must not find out while it waits.
    if local == Some(PREFILL_COMPLETE) || remote == Some(PREFILL_COMPLETE) {
        let sizes = [theirs.attn_tp_size, theirs.attn_cp_size, theirs.pp_size];
        if sizes != [1, 1, 1] {
            let (local, remote) = (View::text(local), View::Sizes(prefill));
            report(ReasonKind::PrefillComplete, Severity::Fatal, local, remote);
        }
    }
}

fn visit_tp<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    let (local, remote) = (decode.attn_tp_size(), prefill.attn_tp_size());
    if local != remote {
        let mut unequal = |kind, severity| report(kind, severity, View::Number(local), View::Number(remote));
        if decode.spec().requires_equal_tp {
            unequal(ReasonKind::EqualTp, Severity::Fatal);
        }
        if is_tp_sharded(decode, prefill) {
            unequal(ReasonKind::ShardingTp, Severity::Fatal);
        } else if !local.is_multiple_of(remote) && !remote.is_multiple_of(local) {
            unequal(ReasonKind::TpDivisibility, Severity::Fatal);
        } else if decode.kv() == KvKind::Mha {
            unequal(ReasonKind::UnequalTp, Severity::Warning);
        }
    }
    if decode.kv() != KvKind::Mla
        && let Some(heads) = decode.spec().num_kv_heads
        && [local, remote].map(|tp| kv_head_range(heads, tp, 0)).contains(&None)
    {
        let (local, remote) = (View::Heads { heads, tp: local }, View::Heads { heads, tp: remote });
        report(ReasonKind::NumKvHeads, Severity::Fatal, local, remote);
    }
}

fn visit_other_sizes<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    let ours = decode.spec();
    // A policy, not a law: peers experiment with equal CP on both sides (CASES area 1, moving targets).
    if ours.attn_cp_size != 1 {
        let (local, remote) = (View::Number(ours.attn_cp_size), View::Number(prefill.attn_cp_size()));
        report(ReasonKind::DecodeCp, Severity::Fatal, local, remote);
    }
    if ours.pp_size != 1 && ours.pp_size != prefill.pp_size() {
        let (local, remote) = (View::Number(ours.pp_size), View::Number(prefill.pp_size()));
        report(ReasonKind::PpSize, Severity::Fatal, local, remote);
    }
}

fn visit_dcp<'a>(decode: &'a DecodeRank, prefill: &'a PrefillInfo, report: Report<'_, 'a>) {
    let local = View::Number(decode.spec().dcp_size);
    if decode.spec().dcp_size == 1 {
        return;
    }
    if decode.kv() == KvKind::Mha {
        report(ReasonKind::DcpKv, Severity::Fatal, local, View::Absent);
    }
    if prefill.attn_cp_size() != 1 {
        let remote = View::Number(prefill.attn_cp_size());
        report(ReasonKind::DcpPrefillCp, Severity::Fatal, local, remote);
    }
    if prefill.spec().enable_kv_cache_sharding {
        report(ReasonKind::DcpSharding, Severity::Fatal, local, View::Switch(true));
    }
}

/// `None` when both name one dtype. `auto` says nothing about the real type, so against a concrete name it may be right.
fn dtype_severity(local: &str, remote: &str, strict: bool) -> Option<Severity> {
    let (local, remote) = (canonical_dtype(local), canonical_dtype(remote));
    if local == remote {
        return None;
    }
    let unresolved = local == "auto" || remote == "auto";
    Some(if unresolved && !strict { Severity::Warning } else { Severity::Fatal })
}

/// A [`Side`] that borrows.
#[derive(Clone, Copy)]
enum View<'a> {
    Absent,
    Number(u32),
    Count(u64),
    Switch(bool),
    Text(&'a str),
    Json(&'a Value),
    Heads { heads: u32, tp: u32 },
    Sizes(&'a PrefillInfo),
}

impl<'a> View<'a> {
    fn text(text: Option<&'a str>) -> Self {
        text.map_or(Self::Absent, Self::Text)
    }

    fn json(value: &'a Option<Value>) -> Self {
        value.as_ref().map_or(Self::Absent, Self::Json)
    }

    fn to_side(self) -> Side {
        match self {
            Self::Absent => Side::Absent,
            Self::Number(number) => Side::Number(u64::from(number)),
            Self::Count(count) => Side::Number(count),
            Self::Switch(on) => Side::Switch(on),
            Self::Text(text) => Side::Text(text.to_string()),
            Self::Json(value) => Side::Json(value.clone()),
            Self::Heads { heads, tp } => Side::Heads { heads, tp },
            Self::Sizes(info) => {
                Side::Sizes { tp: info.attn_tp_size(), cp: info.attn_cp_size(), pp: info.pp_size() }
            }
        }
    }
}

#[cfg(test)]
#[path = "compat_tests.rs"]
mod tests;
