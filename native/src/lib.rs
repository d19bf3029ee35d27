//! The native part of `shipper`: takes ordinary records apart, and knows which EventIds are on their way or accepted.
//!
//! It is optional: the Python package does the same without it, and judges by itself whatever is not ordinary.

#![forbid(unsafe_code)]

mod hashing;
mod ledger;
mod lines;
mod window;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use ledger::{Key, Sums, Tally, HOUR};
use lines::{scan_lines, take, Event, Limits};
use window::{keys_in, Window};

/// What the Python package expects of the functions here, see `shipper.system.native`; another one with each change.
const INTERFACE: u32 = 2;

/// Lines, end, slot, keys, ConsumerIDs, those that repeat, ledger, whether a line ended it.
type Taken<'py> =
    (usize, usize, i64, Bound<'py, PyBytes>, Bound<'py, PyBytes>, Vec<(usize, usize, usize)>, PyTally, bool);

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
        let mut run = take(data.as_bytes(), &self.events, start, &limits);
        let mut slot = -1;
        if window.is_on() && !run.events.is_empty() {
            let keys: Vec<u128> = run.events.iter().map(|event| event.key).collect();
            // The keys before the first one that is known are new, also where a line repeats one before it.
            let admitted = window.admit(&keys).or_else(|known_at| {
                run.cut(known_at);
                if known_at > 0 { window.admit(&keys[..known_at]) } else { Ok(0) }
            });
            slot = admitted.expect("they are new") as i64;
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
        let ledger = PyTally { tally: run.tally() };
        Ok((run.events.len(), run.end, slot, keys, consumer_ids, run.repeats(), ledger, run.is_stopped))
    }
}

/// Find the ordinary lines of a chunk; other threads run meanwhile.
#[pyfunction]
fn scan(py: Python<'_>, data: &Bound<'_, PyBytes>) -> Scan {
    let data = data.as_bytes();
    Scan { events: py.detach(|| scan_lines(data)) }
}

/// Counts by hour, brand, affiliate and media.
#[pyclass(frozen, name = "Tally")]
struct PyTally {
    tally: Tally,
}

#[pymethods]
impl PyTally {
    fn __len__(&self) -> usize {
        self.tally.len()
    }

    /// The keys, with how many events were accepted.
    fn items(&self) -> Vec<((&str, i64, &str, &str), i64)> {
        let rows = self.tally.rows();
        rows.map(|(key, counts)| {
            ((text(key.hour), key.brand_id, text(key.affiliate_id), text(key.media)), counts[0])
        })
        .collect()
    }

    /// How many events, accepted and duplicates.
    fn total(&self) -> i64 {
        self.tally.rows().map(|(_, counts)| counts[0] + counts[1]).sum()
    }

    /// The first and the last hour; empty if there is none.
    fn hours(&self) -> (&str, &str) {
        let hours = || self.tally.rows().map(|(key, _)| key.hour);
        (text(hours().min().unwrap_or_default()), text(hours().max().unwrap_or_default()))
    }

    /// The six columns in MessagePack: hours, brands, affiliates, media, accepted, duplicates.
    fn columns<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = py.detach(|| self.tally.columns());
        PyBytes::new(py, &bytes)
    }
}

/// Add up tallies and dicts of counts; None if an affiliate is no identifier, which is counted under another name.
#[pyfunction]
fn add_up(
    py: Python<'_>,
    accepted: Vec<Bound<'_, PyAny>>,
    repeated: Vec<Bound<'_, PyAny>>,
) -> PyResult<Option<PyTally>> {
    let (mut tallies, mut others) = (Vec::new(), Vec::new());
    for (place, parts) in [accepted, repeated].into_iter().enumerate() {
        for part in parts {
            if let Ok(tally) = part.cast::<PyTally>() {
                tallies.push((place, tally.clone().unbind()));
            } else {
                for (key, count) in part.cast::<PyDict>()? {
                    match key.extract::<(String, i64, String, String)>() {
                        Ok(key) if key.0.len() == HOUR => others.push((place, key, count.extract()?)),
                        _ => return Ok(None),
                    }
                }
            }
        }
    }
    let tally = py.detach(|| {
        let mut sums = Sums::new(tallies.iter().map(|(_, part)| part.get().tally.len()).sum());
        for (place, part) in &tallies {
            part.get().tally.rows().for_each(|(key, counts)| sums.add(key, *place, counts[0]));
        }
        for (place, (hour, brand_id, affiliate_id, media), count) in &others {
            let (hour, affiliate_id, media) = (hour.as_bytes(), affiliate_id.as_bytes(), media.as_bytes());
            sums.add(Key { hour, brand_id: *brand_id, affiliate_id, media }, *place, *count);
        }
        Tally::of(&sums)
    });
    Ok(tally.has_identifiers().then_some(PyTally { tally }))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it was text when it was read")
}

#[pymodule]
fn shipper_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("INTERFACE", INTERFACE)?;
    module.add_class::<PyWindow>()?;
    module.add_class::<Scan>()?;
    module.add_class::<PyTally>()?;
    module.add_function(wrap_pyfunction!(add_up, module)?)?;
    module.add_function(wrap_pyfunction!(scan, module)?)
}
