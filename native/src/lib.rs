//! The native part of `shipper`: takes ordinary records apart, and knows which EventIds are on their way or accepted.
//!
//! It is optional: the Python package does the same without it, and judges by itself whatever is not ordinary.

#![forbid(unsafe_code)]

mod hashing;
mod lines;
mod window;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use lines::{scan_lines, Limits};
use window::{keys_in, Window};

/// What `scan` returns: lines, end, slot, keys, ConsumerIDs, whether these are distinct, ledger, why it ended.
type Scanned<'py> = (usize, usize, i64, Bound<'py, PyBytes>, Bound<'py, PyBytes>, bool, Bound<'py, PyDict>, bool);

#[pyclass(name = "DedupeWindow")]
struct PyWindow {
    window: Window,
}

/// Has the methods of `shipper.codec.dedupe.DedupeWindow`, with the same answers.
#[pymethods]
impl PyWindow {
    #[new]
    fn new(size: usize) -> Self {
        PyWindow { window: Window::new(size) }
    }

    #[getter]
    fn is_on(&self) -> bool {
        self.window.is_on()
    }

    fn is_accepted(&self, key: &[u8]) -> bool {
        keys_in(key).next().is_some_and(|key| self.window.is_accepted(key))
    }

    fn is_unsettled(&self, key: &[u8]) -> bool {
        keys_in(key).next().is_some_and(|key| self.window.is_unsettled(key))
    }

    fn admit(&mut self, keys: &[u8]) -> Option<u64> {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.admit(&keys).ok()
    }

    fn remember(&mut self, keys: &[u8]) {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.remember(&keys);
    }

    fn accept(&mut self, slot: u64, ordinals: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Ok(list) = ordinals.cast::<PyList>() {
            let ordinals: Vec<usize> = list.extract()?;
            return Ok(self.window.accept(slot, ordinals.into_iter()));
        }
        let (start, stop): (usize, usize) =
            (ordinals.getattr("start")?.extract()?, ordinals.getattr("stop")?.extract()?);
        Ok(self.window.accept(slot, start..stop))
    }

    fn accept_one(&mut self, key: &[u8]) {
        keys_in(key).for_each(|key| self.window.accept_one(key));
    }

    fn accept_all<'py>(&mut self, py: Python<'py>, keys: &[u8]) -> Vec<Bound<'py, PyBytes>> {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.accept_all(&keys).into_iter().map(|key| PyBytes::new(py, &key.to_be_bytes())).collect()
    }

    fn take_back(&mut self, slot: u64, keys: &[u8]) {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.take_back(slot, &keys);
    }

    fn forget(&mut self, key: &[u8]) {
        keys_in(key).for_each(|key| self.window.forget(key));
    }
}

/// Take ordinary lines from `start` on, and admit their EventIds to a window that is on.
///
/// It ends before the first line that is not ordinary, whose EventId is known, or that has no room: at least one of
/// the limits then. The last item tells whether it ended because of the line itself.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn scan<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyBytes>,
    start: usize,
    room_events: usize,
    room_bytes: usize,
    max_record_bytes: usize,
    latest: &str,
    window: &Bound<'py, PyWindow>,
) -> PyResult<Scanned<'py>> {
    let mut borrowed = window.borrow_mut();
    let window = &mut borrowed.window;
    let limits =
        Limits { events: room_events, bytes: room_bytes, record_bytes: max_record_bytes, latest: latest.as_bytes() };
    let mut found = scan_lines(data.as_bytes(), start, &limits, window);
    let mut slot = -1;
    if window.is_on() && !found.events.is_empty() {
        let keys: Vec<u128> = found.events.iter().map(|event| event.key).collect();
        // A line of this piece may repeat one before it; that one is new.
        let admitted = window.admit(&keys).or_else(|known_at| {
            found.cut(known_at);
            window.admit(&keys[..known_at])
        });
        slot = admitted.expect("the keys before the first one that is known are new") as i64;
    }
    let events = &found.events;
    let keys = PyBytes::new_with(py, if window.is_on() { 16 * events.len() } else { 0 }, |bytes| {
        for (place, event) in bytes.chunks_exact_mut(16).zip(events) {
            place.copy_from_slice(&event.key.to_be_bytes());
        }
        Ok(())
    })?;
    let consumer_ids = PyBytes::new_with(py, 8 * events.len(), |bytes| {
        for (place, event) in bytes.chunks_exact_mut(8).zip(events) {
            place.copy_from_slice(&event.consumer_id.to_ne_bytes());
        }
        Ok(())
    })?;
    let ledger = PyDict::new(py);
    for (key, count) in found.tally() {
        ledger.set_item((text(key.hour), key.brand_id, text(key.affiliate_id), text(key.media)), count)?;
    }
    Ok((events.len(), found.end, slot, keys, consumer_ids, found.has_distinct_consumers(), ledger, found.is_stopped))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("strings are checked when they are read")
}

#[pymodule]
fn shipper_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<PyWindow>()?;
    module.add_function(wrap_pyfunction!(scan, module)?)
}
