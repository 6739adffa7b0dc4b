//! The answer to `GET /routes`: topology and endpoints of one dp rank as one snapshot (WIRE.md section 4).

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::object::{Fields, Object, Raw};
use super::{RankEndpoint, TopologyBody, endpoint, topology};
use crate::error::{ProtocolError, ProtocolRule};
use crate::failure::Coordinates;
use crate::topology::{MAX_SIZE, PrefillInfo};

/// All that one answer says about a prefill engine and one of its dp ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// One life of the engine, if it is stated.
    pub instance: Option<String>,
    /// One snapshot of the registrations, if it is stated.
    pub epoch: Option<String>,
    /// What the prefill engine is.
    pub info: Box<PrefillInfo>,
    /// Ascending.
    ranks: Vec<(Coordinates, RankEndpoint)>,
}

impl Table {
    /// Where a rank listens, by its (dp, cp, tp, pp).
    #[must_use]
    pub fn find(&self, rank: Coordinates) -> Option<&RankEndpoint> {
        let found = self.ranks.binary_search_by_key(&rank, |&(at, _)| at).ok()?;
        self.ranks.get(found).map(|(_, endpoint)| endpoint)
    }
}

/// Reads the answer to `GET /routes`.
///
/// # Errors
/// [`ProtocolError`] naming the field, `body` when it is not a JSON object, `topology` when its sizes are null; a rank
/// that stands twice is one of `ranks`.
pub fn parse_table(body: &[u8]) -> Result<Table, ProtocolError> {
    let object = Object::parse(body)?;
    let fields = object.unique()?;
    let stated = fields.required("topology")?;
    let info = match topology::read(&stated.object()?.unique()?)? {
        TopologyBody::Info(info) => info,
        TopologyBody::NotReady => return Err(stated.refused(ProtocolRule::NotReady)),
    };
    let listed = fields.required("ranks")?;
    let mut ranks = listed.items()?.into_iter().map(rank).collect::<Result<Vec<_>, _>>()?;
    ranks.sort_unstable_by_key(|&(at, _)| at);
    let twice = ranks.windows(2).any(|pair| matches!(pair, [(first, _), (second, _)] if first == second));
    if twice {
        return Err(listed.refused(ProtocolRule::DuplicateKey));
    }
    Ok(Table { instance: name(&fields, "instance_id")?, epoch: name(&fields, "epoch")?, info, ranks })
}

fn rank(raw: Raw<'_>) -> Result<(Coordinates, RankEndpoint), ProtocolError> {
    let object = raw.object()?;
    let fields = object.unique()?;
    let size = |key| -> Result<u32, ProtocolError> {
        let raw = fields.required(key)?;
        let number = raw.integer(0, u64::from(MAX_SIZE) - 1)?;
        u32::try_from(number).map_err(|_| raw.refused(ProtocolRule::NotAnInteger))
    };
    Ok(((size("dp")?, size("cp")?, size("tp")?, size("pp")?), endpoint(&fields)?))
}

fn name(fields: &Fields<'_>, key: &str) -> Result<Option<String>, ProtocolError> {
    let Some(raw) = fields.stated(key) else {
        return Ok(None);
    };
    raw.string()?.map(|text| Some(text.to_string())).ok_or_else(|| raw.refused(ProtocolRule::NotAString))
}
