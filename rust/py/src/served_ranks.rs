//! The inverse mapping for Python: what one prefill rank serves.

use disagg_core::rank_mapping as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};

use crate::arguments::{Whole, constructor_form};
use crate::errors::Error;
use crate::rank_mapping::range;
use crate::topology::{DecodeRank, PrefillInfo};

/// What one prefill rank has to do for the requests of a decode engine.
#[pyclass(module = "disagg._core", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ServedRanks(core::ServedRanks);

impl ServedRanks {
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Vec<(&'static str, Bound<'py, PyAny>)>> {
        Ok(vec![
            ("role", self.0.role().into_pyobject(py)?.into_any()),
            ("decode_tp_ranks", self.decode_tp_ranks(py)?.into_any()),
            ("decode_pp_rank", self.decode_pp_rank().into_pyobject(py)?.into_any()),
        ])
    }
}

#[pymethods]
impl ServedRanks {
    #[new]
    #[pyo3(signature = (*, role, decode_tp_ranks, decode_pp_rank))]
    fn new(role: &str, decode_tp_ranks: Vec<u32>, decode_pp_rank: Option<Whole>) -> PyResult<Self> {
        let stage = decode_pp_rank.map(|rank| rank.within("decode_pp_rank", 0, u32::MAX)).transpose()?;
        match (role, stage) {
            ("idle", None) if decode_tp_ranks.is_empty() => Ok(Self(core::ServedRanks::Idle)),
            ("dummy" | "real", Some(pp_rank)) => {
                let ranks =
                    core::DecodeRanks { tp_ranks: range("decode_tp_ranks", &decode_tp_ranks)?, pp_rank };
                let serves = if role == "real" { core::ServedRanks::Real } else { core::ServedRanks::Dummy };
                Ok(Self(serves(ranks)))
            }
            _ => Err(PyValueError::new_err(format!(
                "role {role}: must be real or dummy with decode ranks and their stage, or idle without"
            ))),
        }
    }

    #[getter]
    fn role(&self) -> &'static str {
        self.0.role()
    }

    #[getter]
    fn decode_tp_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.decode_ranks().map_or(0..0, |ranks| ranks.tp_ranks.ranks()))
    }

    #[getter]
    fn decode_pp_rank(&self) -> Option<u32> {
        self.0.decode_ranks().map(|ranks| ranks.pp_rank)
    }

    #[getter]
    fn required_dst_info_num(&self) -> u32 {
        self.0.required_dst_info_num()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        constructor_form("ServedRanks", &self.fields(py)?)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        Ok(((), self.fields(py)?.into_py_dict(py)?))
    }
}

/// Says which decode ranks a prefill rank serves, or raises `IncompatiblePeer`.
#[pyfunction]
#[pyo3(
    signature = (decode, prefill, /, *, tp_rank, cp_rank = Whole::Number(0), pp_rank = Whole::Number(0)),
    text_signature = "(decode, prefill, /, *, tp_rank, cp_rank=0, pp_rank=0)"
)]
pub fn serve_ranks(
    decode: &DecodeRank,
    prefill: &PrefillInfo,
    tp_rank: Whole,
    cp_rank: Whole,
    pp_rank: Whole,
) -> PyResult<ServedRanks> {
    let info = prefill.inner();
    let tp = tp_rank.within("tp_rank", 0, info.attn_tp_size() - 1)?;
    let cp = cp_rank.within("cp_rank", 0, info.attn_cp_size() - 1)?;
    let pp = pp_rank.within("pp_rank", 0, info.pp_size() - 1)?;
    let rank = core::PrefillRank::new(info, tp, cp, pp).map_err(Error::from)?;
    Ok(ServedRanks(core::serve_ranks(decode.inner(), info, rank).map_err(Error::from)?))
}
