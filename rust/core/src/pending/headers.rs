//! What the headers of an answer say about the peer: which life it is, which snapshot, and what it can do.

use alloc::sync::Arc;

use serde_json::Value;

use crate::topology::PrefillInfo;

/// The headers of one answer that concern the peer, each None where it is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headers<'a> {
    /// `X-SGLang-Disaggregation-Instance-ID`: one life of the prefill engine.
    pub instance: Option<&'a str>,
    /// `X-Disagg-Epoch`: one snapshot of its registrations.
    pub epoch: Option<&'a str>,
    /// `X-Disagg-Features`: what it understands beyond SGLang's protocol.
    pub features: Option<&'a str>,
}

impl<'a> Headers<'a> {
    /// The same without values that are empty, or too long to be kept.
    pub(super) fn within_limits(self) -> Self {
        let short = |text: &&str| (1..=MAX_VALUE).contains(&text.len());
        Self {
            instance: self.instance.filter(short),
            epoch: self.epoch.filter(short),
            features: self.features.filter(short),
        }
    }

    /// With the instance that a peer may name in its topology, where no header does.
    pub(super) fn or_of_topology(self, info: &'a PrefillInfo) -> Self {
        let field = info.extras().get("instance_id").and_then(Value::as_str);
        Self { instance: self.instance.or(field), ..self }.within_limits()
    }
}

/// Which life of a peer, and which of its snapshots, as far as it says. Values are compared for equality only.
#[derive(Clone, Debug, Default)]
pub(super) struct Identity {
    pub instance: Option<Arc<str>>,
    epoch: Option<Arc<str>>,
}

impl Identity {
    /// What an answer says.
    pub fn of(said: Headers<'_>) -> Self {
        Self { instance: said.instance.map(Arc::from), epoch: said.epoch.map(Arc::from) }
    }

    /// Whether it is said of another life or snapshot; what is not said does not differ.
    pub fn differs_from(&self, said: Headers<'_>) -> bool {
        let differ = |known: &Option<Arc<str>>, said: Option<&str>| matches!((known, said), (Some(known), Some(said)) if **known != *said);
        differ(&self.instance, said.instance) || differ(&self.epoch, said.epoch)
    }

    /// Keep what was not known before.
    pub fn learn(&mut self, said: Headers<'_>) {
        self.instance = self.instance.take().or_else(|| said.instance.map(Arc::from));
        self.epoch = self.epoch.take().or_else(|| said.epoch.map(Arc::from));
    }

    /// Whether a restart shows in it.
    pub fn is_stated(&self) -> bool {
        self.instance.is_some() || self.epoch.is_some()
    }
}

/// What a peer understands beyond SGLang's protocol (WIRE.md section 4).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Features {
    /// `GET /routes`: all endpoints of a dp rank in one answer.
    pub table: bool,
    /// `wait_ms` in the dp-rank query.
    pub wait_query: bool,
}

impl Features {
    /// Those that the header names, among others.
    pub fn of(headers: Headers<'_>) -> Self {
        let has = |name| headers.features.is_some_and(|text| text.split(',').any(|word| word.trim() == name));
        Self { table: has("table"), wait_query: has("wait-query") }
    }
}

/// Bytes; a longer header or field is taken for none, as an empty one is.
const MAX_VALUE: usize = 256;
