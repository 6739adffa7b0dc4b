//! One prefill engine.

use std::sync::Arc;

use disagg_core::error::{ProtocolError, ProtocolRule};
use disagg_core::topology::{EARLY, PrefillInfo as CorePrefillInfo, PrefillInfoSpec};
use disagg_core::wire::{TopologyBody, parse_topology};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{IntoPyDict, PyDict};

use super::{Fields, field, layout, positive, size, tree};
use crate::arguments::{Whole, constructor_form};
use crate::errors::Error;
use crate::json;

/// One prefill engine as its registry describes it.
#[pyclass(module = "disagg._core", frozen, eq, hash)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PrefillInfo(Arc<CorePrefillInfo>);

impl From<CorePrefillInfo> for PrefillInfo {
    fn from(prefill: CorePrefillInfo) -> Self {
        Self(Arc::new(prefill))
    }
}

impl From<Arc<CorePrefillInfo>> for PrefillInfo {
    fn from(prefill: Arc<CorePrefillInfo>) -> Self {
        Self(prefill)
    }
}

impl PrefillInfo {
    /// The core's value.
    pub fn inner(&self) -> &CorePrefillInfo {
        &self.0
    }

    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Fields<'py>> {
        let spec = self.0.spec();
        Ok(vec![
            field(py, "attn_tp_size", spec.attn_tp_size)?,
            field(py, "attn_cp_size", spec.attn_cp_size)?,
            field(py, "dp_size", spec.dp_size)?,
            field(py, "pp_size", spec.pp_size)?,
            field(py, "page_size", spec.page_size)?,
            field(py, "kv_cache_dtype", spec.kv_cache_dtype.as_deref())?,
            field(py, "follow_bootstrap_room", spec.follow_bootstrap_room)?,
            field(py, "enable_dsa_cache_layer_split", spec.enable_dsa_cache_layer_split)?,
            field(py, "enable_kv_cache_sharding", spec.enable_kv_cache_sharding)?,
            field(py, "prefill_http_port", spec.prefill_http_port)?,
            field(py, "kv_layout", spec.kv_layout.as_deref())?,
            field(py, "decode_allocation_policy", spec.decode_allocation_policy.as_deref())?,
            field(py, "dynamic_dp_size", spec.dynamic_dp_size)?,
            field(py, "spec_layout", tree(py, spec.spec_layout.as_ref())?)?,
            field(py, "extras", json::to_dict(py, spec.extras.iter())?)?,
        ])
    }
}

#[pymethods]
impl PrefillInfo {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, one for each fact")]
    #[pyo3(
        signature = (*, attn_tp_size, attn_cp_size=Whole::Number(1), dp_size=Whole::Number(1),
            pp_size=Whole::Number(1), page_size=Some(Whole::Number(64)),
            kv_cache_dtype=Some("auto".to_owned()), follow_bootstrap_room=true,
            enable_dsa_cache_layer_split=false, enable_kv_cache_sharding=false, prefill_http_port=None,
            kv_layout=None, decode_allocation_policy=Some(EARLY.to_owned()), dynamic_dp_size=false,
            spec_layout=None, extras=None),
        text_signature = "(*, attn_tp_size, attn_cp_size=1, dp_size=1, pp_size=1, page_size=64, \
            kv_cache_dtype='auto', follow_bootstrap_room=True, enable_dsa_cache_layer_split=False, \
            enable_kv_cache_sharding=False, prefill_http_port=None, kv_layout=None, \
            decode_allocation_policy='early', dynamic_dp_size=False, spec_layout=None, extras=None)"
    )]
    fn new(
        attn_tp_size: Whole,
        attn_cp_size: Whole,
        dp_size: Whole,
        pp_size: Whole,
        page_size: Option<Whole>,
        kv_cache_dtype: Option<String>,
        follow_bootstrap_room: bool,
        enable_dsa_cache_layer_split: bool,
        enable_kv_cache_sharding: bool,
        prefill_http_port: Option<Whole>,
        kv_layout: Option<String>,
        decode_allocation_policy: Option<String>,
        dynamic_dp_size: bool,
        spec_layout: Option<Bound<'_, PyDict>>,
        extras: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let extras = extras.map(|extras| json::to_object("extras", &extras)).transpose()?;
        let spec = PrefillInfoSpec {
            attn_tp_size: size("attn_tp_size", attn_tp_size)?,
            attn_cp_size: size("attn_cp_size", attn_cp_size)?,
            dp_size: size("dp_size", dp_size)?,
            pp_size: size("pp_size", pp_size)?,
            page_size: positive("page_size", page_size)?,
            kv_cache_dtype,
            follow_bootstrap_room,
            enable_dsa_cache_layer_split,
            enable_kv_cache_sharding,
            prefill_http_port: port(prefill_http_port)?,
            kv_layout,
            decode_allocation_policy,
            dynamic_dp_size,
            spec_layout: layout(spec_layout.as_ref())?,
            extras: extras.into_iter().flatten().collect(),
        };
        Ok(CorePrefillInfo::new(spec).map_err(Error::from)?.into())
    }

    #[staticmethod]
    #[pyo3(signature = (body, /))]
    fn from_json(body: Body) -> Result<Self, Error> {
        match parse_topology(body.bytes())? {
            TopologyBody::Info(info) => Ok((*info).into()),
            TopologyBody::NotReady => {
                Err(ProtocolError::new("attn_tp_size", "null", ProtocolRule::NotReady).into())
            }
        }
    }

    #[getter]
    fn attn_tp_size(&self) -> u32 {
        self.0.spec().attn_tp_size
    }

    #[getter]
    fn attn_cp_size(&self) -> u32 {
        self.0.spec().attn_cp_size
    }

    #[getter]
    fn dp_size(&self) -> u32 {
        self.0.spec().dp_size
    }

    #[getter]
    fn pp_size(&self) -> u32 {
        self.0.spec().pp_size
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
    fn follow_bootstrap_room(&self) -> bool {
        self.0.spec().follow_bootstrap_room
    }

    #[getter]
    fn enable_dsa_cache_layer_split(&self) -> bool {
        self.0.spec().enable_dsa_cache_layer_split
    }

    #[getter]
    fn enable_kv_cache_sharding(&self) -> bool {
        self.0.spec().enable_kv_cache_sharding
    }

    #[getter]
    fn prefill_http_port(&self) -> Option<u16> {
        self.0.spec().prefill_http_port
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
    fn dynamic_dp_size(&self) -> bool {
        self.0.spec().dynamic_dp_size
    }

    #[getter]
    fn spec_layout<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        tree(py, self.0.spec().spec_layout.as_ref())
    }

    #[getter]
    fn extras<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        json::to_dict(py, self.0.spec().extras.iter())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        constructor_form("PrefillInfo", &self.fields(py)?)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        Ok(((), self.fields(py)?.into_py_dict(py)?))
    }
}

/// A topology answer as Python has it.
#[derive(FromPyObject)]
enum Body {
    Text(PyBackedStr),
    Bytes(PyBackedBytes),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

fn port(value: Option<Whole>) -> PyResult<Option<u16>> {
    let number = value.map(|value| value.within("prefill_http_port", 1, u32::from(u16::MAX)));
    Ok(number.transpose()?.and_then(|number| u16::try_from(number).ok()))
}
