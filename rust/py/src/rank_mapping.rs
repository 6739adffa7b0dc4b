//! Rank mappings for Python.

use disagg_core::compat;
use disagg_core::rank_mapping as core;
use disagg_core::topology::MAX_SIZE;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyTuple};

use crate::arguments::{Whole, constructor_form};
use crate::errors::{Error, reasons_to_python};
use crate::topology::{DecodeRank, PrefillInfo};

/// The prefill ranks that one decode rank reads, of any one dp group, and how many answers each side awaits.
#[pyclass(module = "disagg._core", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankMapping(core::RankMapping);

impl From<core::RankMapping> for RankMapping {
    fn from(mapping: core::RankMapping) -> Self {
        Self(mapping)
    }
}

impl RankMapping {
    /// The core's value.
    pub const fn inner(&self) -> core::RankMapping {
        self.0
    }

    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Vec<(&'static str, Bound<'py, PyAny>)>> {
        let answers = self.0.required_prefill_response_num;
        Ok(vec![
            ("target_tp_rank", self.0.target_tp_rank.into_pyobject(py)?.into_any()),
            ("target_tp_ranks", self.target_tp_ranks(py)?.into_any()),
            ("target_cp_ranks", self.target_cp_ranks(py)?.into_any()),
            ("target_pp_ranks", self.target_pp_ranks(py)?.into_any()),
            ("required_dst_info_num", self.0.required_dst_info_num.into_pyobject(py)?.into_any()),
            ("required_prefill_response_num", answers.into_pyobject(py)?.into_any()),
        ])
    }
}

#[pymethods]
impl RankMapping {
    #[new]
    #[pyo3(signature = (*, target_tp_rank, target_tp_ranks, target_cp_ranks, target_pp_ranks,
        required_dst_info_num, required_prefill_response_num))]
    fn new(
        target_tp_rank: Option<Whole>,
        target_tp_ranks: Vec<u32>,
        target_cp_ranks: Vec<u32>,
        target_pp_ranks: Vec<u32>,
        required_dst_info_num: Whole,
        required_prefill_response_num: Whole,
    ) -> PyResult<Self> {
        let count = |name, value: Whole| value.within(name, 1, u32::MAX);
        let (destinations, answers) = (required_dst_info_num, required_prefill_response_num);
        let real = target_tp_rank.map(|rank| rank.within("target_tp_rank", 0, u32::MAX));
        Ok(Self(core::RankMapping {
            target_tp_rank: real.transpose()?,
            target_tp_ranks: range("target_tp_ranks", &target_tp_ranks)?,
            target_cp_ranks: range("target_cp_ranks", &target_cp_ranks)?,
            target_pp_ranks: range("target_pp_ranks", &target_pp_ranks)?,
            required_dst_info_num: count("required_dst_info_num", destinations)?,
            required_prefill_response_num: count("required_prefill_response_num", answers)?,
        }))
    }

    #[getter]
    fn target_tp_rank(&self) -> Option<u32> {
        self.0.target_tp_rank
    }

    #[getter]
    fn target_tp_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.target_tp_ranks.ranks())
    }

    #[getter]
    fn target_cp_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.target_cp_ranks.ranks())
    }

    #[getter]
    fn target_pp_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.target_pp_ranks.ranks())
    }

    #[getter]
    fn required_dst_info_num(&self) -> u32 {
        self.0.required_dst_info_num
    }

    #[getter]
    fn required_prefill_response_num(&self) -> u32 {
        self.0.required_prefill_response_num
    }

    #[getter]
    fn dummy_tp_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.dummy_tp_ranks())
    }

    #[getter]
    fn contact_count(&self) -> u32 {
        self.0.contact_count()
    }

    fn contacts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.contacts().map(Contact))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        constructor_form("RankMapping", &self.fields(py)?)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        Ok(((), self.fields(py)?.into_py_dict(py)?))
    }
}

/// One prefill rank to contact, in an engine's dp group.
#[pyclass(module = "disagg._core", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Contact(core::Contact);

#[pymethods]
impl Contact {
    #[new]
    #[pyo3(signature = (cp, tp, pp, dummy))]
    fn new(cp: u32, tp: u32, pp: u32, dummy: bool) -> Self {
        Self(core::Contact { cp, tp, pp, dummy })
    }

    #[getter]
    fn cp(&self) -> u32 {
        self.0.cp
    }

    #[getter]
    fn tp(&self) -> u32 {
        self.0.tp
    }

    #[getter]
    fn pp(&self) -> u32 {
        self.0.pp
    }

    #[getter]
    fn dummy(&self) -> bool {
        self.0.dummy
    }

    fn __repr__(&self) -> String {
        let core::Contact { cp, tp, pp, dummy } = self.0;
        let dummy = if dummy { "True" } else { "False" };
        format!("Contact(cp={cp}, tp={tp}, pp={pp}, dummy={dummy})")
    }

    fn __getnewargs__(&self) -> (u32, u32, u32, bool) {
        (self.0.cp, self.0.tp, self.0.pp, self.0.dummy)
    }
}

/// Maps a decode rank onto a prefill engine, or raises `IncompatiblePeer`.
#[pyfunction]
#[pyo3(signature = (decode, prefill, /))]
pub fn map_ranks(decode: &DecodeRank, prefill: &PrefillInfo) -> Result<RankMapping, Error> {
    Ok(core::map_ranks(decode.inner(), prefill.inner())?.into())
}

/// All differences of a pair, fatal ones and warnings.
#[pyfunction]
#[pyo3(signature = (decode, prefill, /))]
pub fn compatibility<'py>(
    py: Python<'py>,
    decode: &DecodeRank,
    prefill: &PrefillInfo,
) -> PyResult<Bound<'py, PyList>> {
    reasons_to_python(py, &compat::check(decode.inner(), prefill.inner()))
}

/// The KV heads that one rank of a TP group holds, as (first, end), or None.
#[pyfunction]
#[pyo3(signature = (num_kv_heads, attn_tp_size, attn_tp_rank, /))]
pub fn kv_head_range(
    num_kv_heads: Whole,
    attn_tp_size: Whole,
    attn_tp_rank: Whole,
) -> PyResult<Option<(u32, u32)>> {
    let heads = num_kv_heads.within("num_kv_heads", 1, u32::MAX)?;
    let size = attn_tp_size.within("attn_tp_size", 1, MAX_SIZE)?;
    let rank = attn_tp_rank.within("attn_tp_rank", 0, size - 1)?;
    Ok(core::kv_head_range(heads, size, rank).map(|heads| (heads.start, heads.end)))
}

/// The range of these ranks, or the error that names the argument.
pub fn range(name: &str, ranks: &[u32]) -> PyResult<core::RankRange> {
    core::RankRange::spanning(ranks).ok_or_else(|| {
        PyValueError::new_err(format!("{name} {ranks:?}: must be consecutive ascending ranks"))
    })
}
