//! Sans-I/O core of disagg.
#![no_std]
#![warn(clippy::alloc_instead_of_core, clippy::std_instead_of_alloc)]

extern crate alloc;

pub mod addr;
mod answer;
pub mod compat;
pub mod error;
pub mod failure;
pub mod ids;
pub mod pending;
pub mod rank_mapping;
pub mod registry;
pub mod retry;
pub mod time;
pub mod topology;
pub mod wire;

pub use answer::{Dialect, TransportError};
