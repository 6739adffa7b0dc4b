//! One rank of a decode engine.

use std::sync::Arc;

use disagg_core::topology::{DecodeRank as CoreDecodeRank, DecodeRankSpec, KvKind, MAX_SIZE};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use super::{Fields, field, layout, positive, size, tree};
use crate::arguments::{Whole, constructor_form};
use crate::errors::Error;

/// One rank of a decode engine.
#[pyclass(module = "disagg._core", frozen, eq, hash)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct DecodeRank(Arc<CoreDecodeRank>);

impl From<CoreDecodeRank> for DecodeRank {
    fn from(decode: CoreDecodeRank) -> Self {
        Self(Arc::new(decode))
    }
}

impl DecodeRank {
    /// The core's value.
    pub fn inner(&self) -> &CoreDecodeRank {
        &self.0
    }

    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Fields<'py>> {
        let spec = self.0.spec();
        Ok(vec![
            field(py, "attn_tp_size", spec.attn_tp_size)?,
            field(py, "engine_rank", spec.engine_rank)?,
            field(py, "attn_cp_size", spec.attn_cp_size)?,
            field(py, "attn_cp_rank", spec.attn_cp_rank)?,
            field(py, "pp_size", spec.pp_size)?,
            field(py, "pp_rank", spec.pp_rank)?,
            field(py, "kv", spec.kv.name())?,
            field(py, "all_cp_ranks", spec.all_cp_ranks)?,
            field(py, "num_kv_heads", spec.num_kv_heads)?,
            field(py, "page_size", spec.page_size)?,
            field(py, "kv_cache_dtype", spec.kv_cache_dtype.as_deref())?,
            field(py, "kv_layout", spec.kv_layout.as_deref())?,
            field(py, "decode_allocation_policy", spec.decode_allocation_policy.as_deref())?,
            field(py, "dcp_size", spec.dcp_size)?,
            field(py, "spec_layout", tree(py, spec.spec_layout.as_ref())?)?,
            field(py, "requires_equal_tp", spec.requires_equal_tp)?,
            field(py, "strict_dtype", spec.strict_dtype)?,
        ])
    }
}

#[pymethods]
impl DecodeRank {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, one for each fact")]
    #[pyo3(
        signature = (*, attn_tp_size, engine_rank, attn_cp_size=Whole::Number(1),
            attn_cp_rank=Whole::Number(0), pp_size=Whole::Number(1), pp_rank=Whole::Number(0), kv="mha",
            all_cp_ranks=None, num_kv_heads=None, page_size=Some(Whole::Number(64)),
            kv_cache_dtype=Some("auto".to_owned()), kv_layout=None, decode_allocation_policy=None,
            dcp_size=Whole::Number(1), spec_layout=None, requires_equal_tp=false, strict_dtype=false),
        text_signature = "(*, attn_tp_size, engine_rank, attn_cp_size=1, attn_cp_rank=0, pp_size=1, pp_rank=0, \
            kv='mha', all_cp_ranks=None, num_kv_heads=None, page_size=64, kv_cache_dtype='auto', \
            kv_layout=None, decode_allocation_policy=None, dcp_size=1, spec_layout=None, \
            requires_equal_tp=False, strict_dtype=False)"
    )]
    fn new(
        attn_tp_size: Whole,
        engine_rank: Whole,
        attn_cp_size: Whole,
        attn_cp_rank: Whole,
        pp_size: Whole,
        pp_rank: Whole,
        kv: &str,
        all_cp_ranks: Option<bool>,
        num_kv_heads: Option<Whole>,
        page_size: Option<Whole>,
        kv_cache_dtype: Option<String>,
        kv_layout: Option<String>,
        decode_allocation_policy: Option<String>,
        dcp_size: Whole,
        spec_layout: Option<Bound<'_, PyDict>>,
        requires_equal_tp: bool,
        strict_dtype: bool,
    ) -> PyResult<Self> {
        let spec = DecodeRankSpec {
            attn_tp_size: size("attn_tp_size", attn_tp_size)?,
            engine_rank: engine_rank.within("engine_rank", 0, u32::MAX)?,
            attn_cp_size: size("attn_cp_size", attn_cp_size)?,
            attn_cp_rank: attn_cp_rank.within("attn_cp_rank", 0, MAX_SIZE)?,
            pp_size: size("pp_size", pp_size)?,
            pp_rank: pp_rank.within("pp_rank", 0, MAX_SIZE)?,
            kv: kind(kv)?,
            all_cp_ranks,
            num_kv_heads: positive("num_kv_heads", num_kv_heads)?,
            page_size: positive("page_size", page_size)?,
            kv_cache_dtype,
            kv_layout,
            decode_allocation_policy,
            dcp_size: size("dcp_size", dcp_size)?,
            spec_layout: layout(spec_layout.as_ref())?,
            requires_equal_tp,
            strict_dtype,
        };
        Ok(CoreDecodeRank::new(spec).map_err(Error::from)?.into())
    }

    #[getter]
    fn attn_tp_size(&self) -> u32 {
        self.0.spec().attn_tp_size
    }

    #[getter]
    fn engine_rank(&self) -> u32 {
        self.0.spec().engine_rank
    }

    #[getter]
    fn attn_cp_size(&self) -> u32 {
        self.0.spec().attn_cp_size
    }

    #[getter]
    fn attn_cp_rank(&self) -> u32 {
        self.0.spec().attn_cp_rank
    }

    #[getter]
    fn pp_size(&self) -> u32 {
        self.0.spec().pp_size
    }

    #[getter]
    fn pp_rank(&self) -> u32 {
        self.0.spec().pp_rank
    }

    #[getter]
    fn attn_tp_rank(&self) -> u32 {
        self.0.attn_tp_rank()
    }

    #[getter]
    fn kv(&self) -> &'static str {
        self.0.kv().name()
    }

    #[getter]
    fn all_cp_ranks(&self) -> Option<bool> {
        self.0.spec().all_cp_ranks
    }

    #[getter]
    fn num_kv_heads(&self) -> Option<u32> {
        self.0.spec().num_kv_heads
    }

    #[getter]
    fn page_size(&self) -> Option<u32> {
        self.0.spec().page_size
    }

    #[getter]
    fn kv_cache_dtype(&self) -> Option<&str> {
        self.0.spec().kv_cache_dtype.as_deref()
    }

    #[getter]
    fn kv_layout(&self) -> Option<&str> {
        self.0.spec().kv_layout.as_deref()
    }

    #[getter]
    fn decode_allocation_policy(&self) -> Option<&str> {
        self.0.spec().decode_allocation_policy.as_deref()
    }

    #[getter]
    fn dcp_size(&self) -> u32 {
        self.0.spec().dcp_size
    }

    #[getter]
    fn spec_layout<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        tree(py, self.0.spec().spec_layout.as_ref())
    }

    #[getter]
    fn requires_equal_tp(&self) -> bool {
        self.0.spec().requires_equal_tp
    }

    #[getter]
    fn strict_dtype(&self) -> bool {
        self.0.spec().strict_dtype
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        constructor_form("DecodeRank", &self.fields(py)?)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        Ok(((), self.fields(py)?.into_py_dict(py)?))
    }
}

fn kind(name: &str) -> PyResult<KvKind> {
    KvKind::from_name(name).ok_or_else(|| {
        let names = KvKind::NAMES.map(|(_, name)| name).join(", ");
        PyValueError::new_err(format!("kv {name}: must be one of {names}"))
    })
}
