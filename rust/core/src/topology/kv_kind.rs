//! The kinds of KV cache.

/// What the KV cache of the decode engine is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvKind {
    /// Per-head keys and values: MHA, GQA and MQA.
    #[default]
    Mha,
    /// A latent that every TP rank holds in full.
    Mla,
    /// Latent and per-head state side by side; counts answers like `Mha`.
    HybridMla,
}

impl KvKind {
    /// Every kind, with the name that Python and the command line use.
    pub const NAMES: [(Self, &'static str); 3] =
        [(Self::Mha, "mha"), (Self::Mla, "mla"), (Self::HybridMla, "hybrid_mla")];

    /// The kind's public name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mha => "mha",
            Self::Mla => "mla",
            Self::HybridMla => "hybrid_mla",
        }
    }

    /// The kind of this name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }
}
