//! Waking the network loop from the scheduler thread without releasing the GIL.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// A descriptor that is readable from a ring until it is silenced.
#[derive(Debug)]
pub struct Bell {
    read: OwnedFd,
    /// The other end where there is no eventfd.
    write: Option<OwnedFd>,
}

impl Bell {
    /// A silent bell.
    ///
    /// # Errors
    /// `OSError` when the process has no descriptors left.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub fn new() -> PyResult<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let read = eventfd(0, flags).map_err(|error| PyOSError::new_err(error.to_string()))?;
        Ok(Self { read, write: None })
    }

    /// A silent bell.
    ///
    /// # Errors
    /// `OSError` when the process has no descriptors left.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub fn new() -> PyResult<Self> {
        use rustix::fs::{OFlags, fcntl_setfl};
        let fail = |error: rustix::io::Errno| PyOSError::new_err(error.to_string());
        let (read, write) = rustix::pipe::pipe().map_err(fail)?;
        for end in [&read, &write] {
            fcntl_setfl(end, OFlags::NONBLOCK).map_err(fail)?;
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC).map_err(fail)?;
        }
        Ok(Self { read, write: Some(write) })
    }

    /// Make it readable. A bell that cannot be written to is ringing already.
    pub fn ring(&self) {
        let end = self.write.as_ref().unwrap_or(&self.read);
        let _ = rustix::io::write(end, &1_u64.to_ne_bytes());
    }

    /// Make it unreadable. One that cannot be read is silent already.
    pub fn silence(&self) {
        let mut rings = [0_u8; 64];
        let _ = rustix::io::read(&self.read, &mut rings);
    }

    /// What an event loop watches.
    pub fn fileno(&self) -> RawFd {
        self.read.as_raw_fd()
    }
}
