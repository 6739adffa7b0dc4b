//! Bodies that a bootstrap server answers with, read strictly (WIRE.md section 3, DESIGN.md section 8).
//!
//! Any bytes give an answer or a [`ProtocolError`], never a panic. What a rule ignores is not examined beyond being JSON;
//! everything that is kept is read without duplicate keys. Every integer is judged by its text, so nothing is rounded on the
//! way; only inside unknown keys does a number that fits neither `i64` nor `u64` become the nearest float.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};

use crate::error::{ProtocolError, ProtocolRule};
use crate::topology::PrefillInfo;

mod not_ready;
mod object;
mod table;
mod topology;

pub use not_ready::parse_not_ready;
use object::{Fields, Object, Raw};
pub use table::{Table, parse_table};

/// A topology answer with status 200.
#[derive(Clone, Debug, PartialEq)]
pub enum TopologyBody {
    /// The sizes are null: the E2 way to say that registration is not complete.
    NotReady,
    /// What the prefill engine is.
    Info(Box<PrefillInfo>),
}

/// Where one prefill rank listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankEndpoint {
    /// An IP address (IPv6 without brackets, perhaps with a zone) or a host name, as it came.
    pub ip: String,
    /// 1 to 65,535.
    pub port: u16,
}

/// One room of a dp-rank answer. The rank is not compared with any `dp_size` here.
pub type RoomRank = (u64, Result<u32, ProtocolError>);

/// Reads a topology answer of any era from E2 on.
///
/// # Errors
/// [`ProtocolError`] naming the field, `body` when it is not a JSON object, `era` for E0 and E1.
pub fn parse_topology(body: &[u8]) -> Result<TopologyBody, ProtocolError> {
    topology::read(&Object::parse(body)?.unique()?)
}

/// Reads a rank answer; keys other than `rank_ip` and `rank_port` are ignored.
///
/// # Errors
/// [`ProtocolError`] naming the field, `body` when it is not a JSON object.
pub fn parse_endpoint(body: &[u8]) -> Result<RankEndpoint, ProtocolError> {
    endpoint(&Object::parse(body)?.unique()?)
}

fn endpoint(fields: &Fields<'_>) -> Result<RankEndpoint, ProtocolError> {
    let ip = fields.required("rank_ip")?;
    let host = ip.string()?.filter(|text| is_host(text));
    let host = host.ok_or_else(|| ip.refused(ProtocolRule::NotAHost))?;
    let port = fields.required("rank_port")?;
    let number = port.integer(1, u64::from(u16::MAX))?;
    let number = u16::try_from(number).map_err(|_| port.refused(ProtocolRule::NotAnInteger))?;
    Ok(RankEndpoint { ip: host.into_owned(), port: number })
}

/// Reads a dp-rank answer: each room that it names, ascending, with its dp rank or what is wrong with it.
///
/// A key that is no canonical room belongs to no room and is skipped; a room that stands twice is an error of that room.
///
/// # Errors
/// [`ProtocolError`] about `body` when it is not a JSON object.
pub fn parse_dp_ranks(body: &[u8]) -> Result<Vec<RoomRank>, ProtocolError> {
    let object = Object::parse(body)?;
    let mut rooms: Vec<RoomRank> =
        object.entries().filter_map(|raw| Some((canonical_room(raw.key)?, dp_rank(raw)))).collect();
    rooms.sort_by_key(|(room, _)| *room);
    rooms.dedup_by(|again, first| {
        let same = again.0 == first.0;
        if same {
            first.1 = Err(ProtocolError::new(&alloc::format!("{}", first.0), "", ProtocolRule::DuplicateKey));
        }
        same
    });
    Ok(rooms)
}

/// The greatest room: rooms are signed 64-bit in every peer.
pub const MAX_ROOM: u64 = i64::MAX.unsigned_abs();

fn dp_rank(raw: Raw<'_>) -> Result<u32, ProtocolError> {
    let number = raw.integer(0, u64::from(u32::MAX))?;
    u32::try_from(number).map_err(|_| raw.refused(ProtocolRule::NotAnInteger))
}

fn canonical_room(key: &str) -> Option<u64> {
    let digits = key.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || (key.len() > 1 && key.starts_with('0')) {
        return None;
    }
    key.parse().ok().filter(|room| *room <= MAX_ROOM)
}

/// A plausible host: enough that nothing else can hide in it (blanks, a path, a port), not that it exists.
fn is_host(text: &str) -> bool {
    if let Some((address, zone)) = text.split_once('%') {
        return address.parse::<Ipv6Addr>().is_ok() && is_label(zone.as_bytes(), b"._-");
    }
    if text.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = text.strip_suffix('.').unwrap_or(text);
    let numeric =
        name.rsplit('.').next().is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()));
    // Four numbers that are no address must not be looked up as a name; resolvers disagree on them.
    name.len() <= MAX_NAME_BYTES && !numeric && name.split('.').all(|label| is_label(label.as_bytes(), b"_-"))
}

fn is_label(label: &[u8], also: &[u8]) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && !label.starts_with(b"-")
        && !label.ends_with(b"-")
        && label.iter().all(|byte| byte.is_ascii_alphanumeric() || also.contains(byte))
}

const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
