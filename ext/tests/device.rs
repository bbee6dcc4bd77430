//! Streams and statistics, which do nothing on the CPU; and what is known of this libtorch and this process.
#![allow(clippy::unwrap_used)]

use ferrotitan_ext::cuda::{self, Stream};
use ferrotitan_ext::{Error, library, memory};
use tch::{Device, Kind, Tensor};

fn devices() -> Vec<Device> {
    if cuda::is_available() { vec![Device::Cpu, Device::Cuda(0)] } else { vec![Device::Cpu] }
}

#[test]
fn a_side_stream_does_the_same_work() {
    for device in devices() {
        let main = Stream::current(device).unwrap();
        let side = Stream::new(device, true).unwrap();
        let x = Tensor::ones([1000], (Kind::Double, device));
        side.wait_stream(&main).unwrap();
        let start = side.record_time().unwrap();
        let y = side.with(|| {
            assert_eq!(Stream::current(device).unwrap(), side);
            side.record_tensor(&x).unwrap();
            &x * 2.0
        });
        let y = y.unwrap();
        let end = side.record_time().unwrap();
        main.wait_event(&side.record().unwrap()).unwrap();
        main.record_tensor(&y).unwrap();
        assert_eq!(Stream::current(device).unwrap(), main);
        assert_eq!(y.sum(Kind::Double).double_value(&[]), 2000.0);
        end.synchronize().unwrap();
        side.synchronize().unwrap();
        assert!(end.is_reached().unwrap());
        assert_eq!(start.elapsed_until(&end).unwrap().is_some(), device.is_cuda());
        cuda::synchronize(device).unwrap();
        cuda::reset_peak(device).unwrap();
        assert_eq!(cuda::memory_stats(device).is_some(), device.is_cuda());
        assert_eq!(cuda::device_name(device).is_some(), device.is_cuda());
        let panicked = std::panic::catch_unwind(|| side.with(|| panic!("inside")));
        assert!(panicked.is_err());
        assert_eq!(Stream::current(device).unwrap(), main, "also after a panic");
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let missing = Device::Cuda(cuda::device_count());
    assert!(Stream::new(missing, false).is_err());
    assert!(cuda::synchronize(missing).is_err());
    assert!(cuda::reset_peak(missing).is_err());
    assert!(cuda::memory_stats(missing).is_none() && cuda::device_name(missing).is_none());
    assert!(matches!(Stream::current(Device::Mps), Err(Error::Unsupported { .. })));
}

#[test]
fn the_library_is_the_one_that_was_linked() {
    assert!(library::torch_version().starts_with("2."), "{}", library::torch_version());
    assert!(library::gloo_compiled());
    let loaded = library::loaded_libraries();
    let linked = library::lib_dir().join("libtorch_cpu.so").canonicalize().unwrap();
    assert!(loaded.iter().any(|path| path.canonicalize().unwrap() == linked), "{loaded:?}");
    assert!(library::parallel_info().contains("thread"), "{}", library::parallel_info());
    assert_eq!(library::lib_dir().join("libtorch_cuda.so").exists(), library::cuda_version().is_some());
    assert!(library::cuda_version().is_some() || !library::nccl_compiled());
    assert!(library::cxx11_abi());
    library::set_deterministic(true);
    assert!(library::deterministic());
    library::set_deterministic(false);
    assert!(!library::deterministic());
}

#[test]
fn memory_is_counted() {
    const BYTES: u64 = 64 << 20;
    let before = memory::rss().unwrap();
    let tensor = Tensor::ones([BYTES as i64 / 8], (Kind::Double, Device::Cpu));
    let with = memory::rss().unwrap();
    assert!(with > before + BYTES / 2, "{before} {with}");
    drop(tensor);
    memory::trim();
    assert!(memory::rss().unwrap() < with - BYTES / 2);
    // The kernel counts the peak in steps.
    assert!(memory::peak_rss().unwrap() > before + BYTES / 2);
}
