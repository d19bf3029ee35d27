//! The native part of `shipper`: takes ordinary records apart, and knows which EventIds are on their way or accepted.
//!
//! It is optional: the Python package does the same without it, and judges by itself whatever is not ordinary.

#![forbid(unsafe_code)]

mod hashing;
mod lines;
mod window;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use lines::{scan_lines, take, Event, Limits};
use window::{keys_in, Window};

/// Lines, end, slot, keys, ConsumerIDs, those that repeat, ledger, whether a line ended it.
type Taken<'py> =
    (usize, usize, i64, Bound<'py, PyBytes>, Bound<'py, PyBytes>, Vec<(usize, usize, usize)>, Bound<'py, PyDict>, bool);

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

    fn take_back(&mut self, slot: u64, keys: &[u8]) {
        let keys: Vec<u128> = keys_in(keys).collect();
        self.window.take_back(slot, &keys);
    }

    fn forget(&mut self, key: &[u8]) {
        keys_in(key).for_each(|key| self.window.forget(key));
    }

    fn drop(&mut self, keys: &[u8]) {
        keys_in(keys).for_each(|key| self.window.drop_key(key));
    }
}

/// The ordinary lines of a chunk.
#[pyclass(frozen)]
struct Scan {
    events: Vec<Event>,
}

#[pymethods]
impl Scan {
    /// Take events from `start` on, and admit their EventIds to a window that is on.
    ///
    /// It ends before the first line that is not ordinary, whose EventId is known, or that has no room. The last item
    /// tells whether it ended because of the line itself. `data` is what was scanned.
    #[allow(clippy::too_many_arguments)]
    fn take<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyBytes>,
        start: usize,
        room_events: usize,
        room_bytes: usize,
        max_record_bytes: usize,
        latest: &str,
        window: &Bound<'py, PyWindow>,
    ) -> PyResult<Taken<'py>> {
        let mut borrowed = window.borrow_mut();
        let window = &mut borrowed.window;
        let latest = latest.as_bytes();
        let limits = Limits { events: room_events, bytes: room_bytes, record_bytes: max_record_bytes, latest };
        let mut run = take(data.as_bytes(), &self.events, start, &limits, window);
        let mut slot = -1;
        if window.is_on() && !run.events.is_empty() {
            let keys: Vec<u128> = run.events.iter().map(|event| event.key).collect();
            // A line of this piece may repeat one before it; that one is new.
            let admitted = window.admit(&keys).or_else(|known_at| {
                run.cut(known_at);
                window.admit(&keys[..known_at])
            });
            slot = admitted.expect("the keys before the first one that is known are new") as i64;
        }
        let keys = PyBytes::new_with(py, if window.is_on() { 16 * run.events.len() } else { 0 }, |bytes| {
            for (place, event) in bytes.chunks_exact_mut(16).zip(run.events) {
                place.copy_from_slice(&event.key.to_be_bytes());
            }
            Ok(())
        })?;
        let consumer_ids = PyBytes::new_with(py, 8 * run.events.len(), |bytes| {
            for (place, event) in bytes.chunks_exact_mut(8).zip(run.events) {
                place.copy_from_slice(&event.consumer_id.to_ne_bytes());
            }
            Ok(())
        })?;
        let ledger = PyDict::new(py);
        for (key, count) in run.tally() {
            ledger.set_item((text(key.hour), key.brand_id, text(key.affiliate_id), text(key.media)), count)?;
        }
        Ok((run.events.len(), run.end, slot, keys, consumer_ids, run.repeats(), ledger, run.is_stopped))
    }
}

/// Find the ordinary lines of a chunk; other threads run meanwhile.
#[pyfunction]
fn scan(py: Python<'_>, data: &Bound<'_, PyBytes>) -> Scan {
    let data = data.as_bytes();
    Scan { events: py.detach(|| scan_lines(data)) }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("strings are checked when they are read")
}

#[pymodule]
fn shipper_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<PyWindow>()?;
    module.add_class::<Scan>()?;
    module.add_function(wrap_pyfunction!(scan, module)?)
}
