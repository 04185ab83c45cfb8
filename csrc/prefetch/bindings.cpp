// bindings.cpp: bindings of Ring, Columns and Stager for Python. Waits release the GIL, and threads of the
// stager run without the GIL.
#include "core/bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/dlpack.h"
#include "core/release_gil.h"
#include "prefetch/stager.h"

namespace py = pybind11;

namespace flatout::prefetch {
namespace {

// Addresses come from Python as integers, such as tensor.data_ptr(). Addresses and the sizes of their memory
// cannot be checked. All other numbers are checked.
// NOLINTBEGIN(performance-no-int-to-ptr)
const std::byte* source_pointer(std::uintptr_t address) {
  return reinterpret_cast<const std::byte*>(address);
}
std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
const std::int64_t* index_pointer(std::uintptr_t address) {
  return reinterpret_cast<const std::int64_t*>(address);
}
// NOLINTEND(performance-no-int-to-ptr)

void require(bool fits, const char* otherwise) {
  if (!fits) throw std::invalid_argument(otherwise);
}

// No object in memory is larger. Sums of several sizes up to this limit do not overflow.
constexpr std::size_t most_bytes = std::size_t{1} << 56;
// Limits for batches gathered at a time and for threads. A larger number is an error of the caller.
constexpr std::size_t most_ahead = std::size_t{1} << 16;
constexpr int most_threads = 1024;

std::size_t bytes_of(std::size_t count, std::size_t each) {
  std::size_t bytes = 0;
  require(!__builtin_mul_overflow(count, each, &bytes) && bytes <= most_bytes,
          "count must not ask for more than 2^56 bytes");
  return bytes;
}

// Frees a ring and its pinned memory. A free of pinned memory waits for the device. The thread may have no
// GIL. PyGILState_Check() cannot tell, because the result is always 1 after the first sub-interpreter.
void delete_without_gil(Ring* ring) {
  std::optional<ReleaseGil> nogil;
  PyThreadState* mine = PyGILState_GetThisThreadState();
  if (mine != nullptr && mine == _PyThreadState_UncheckedGet()) nogil.emplace();
  delete ring;
}

// Tensors from which batches are gathered. Keeps the tensors alive.
class Columns {
 public:
  struct Layout {
    dlpack::DataType dtype;
    std::vector<std::int64_t> row_shape;
  };

  // One tensor: (address, rows, stride of a row in bytes).
  using PartSpec = std::tuple<std::uintptr_t, std::int64_t, std::ptrdiff_t>;
  // One column: (its tensors, row_bytes, DLPack type code, bits, row shape).
  using Spec = std::tuple<std::vector<PartSpec>, std::size_t, int, int, std::vector<std::int64_t>>;

  Columns(const std::vector<Spec>& specs, py::object owner) : owner_(std::move(owner)) {
    require(!specs.empty(), "specs must hold at least one column");
    auto columns = std::make_shared<std::vector<Column>>();
    for (const auto& [parts, row_bytes, code, bits, row_shape] : specs) {
      require(!parts.empty(), "specs must hold at least one tensor per column");
      std::vector<Part> column;
      std::size_t all_rows = 0;
      for (const auto& [address, rows, stride] : parts) {
        require(rows >= 0, "rows must be >= 0");
        require(address != 0 || rows == 0 || row_bytes == 0, "address must not be 0");
        all_rows += bytes_of(static_cast<std::size_t>(rows), 1);
        column.push_back({source_pointer(address), rows, stride});
      }
      bytes_of(all_rows, std::max<std::size_t>(row_bytes, 1));
      check_layout(code, bits, row_shape, row_bytes);
      columns->emplace_back(std::move(column), row_bytes);
      layouts_.push_back({{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1}, row_shape});
    }
    columns_ = std::move(columns);
  }

  const std::shared_ptr<const std::vector<Column>>& columns() const { return columns_; }
  const std::vector<Layout>& layouts() const { return layouts_; }

 private:
  // Checks that the row shape and the dtype match `row_bytes`, so that a tensor stays within the gathered
  // rows.
  static void check_layout(int code, int bits, const std::vector<std::int64_t>& row_shape,
                           std::size_t row_bytes) {
    require(code >= 0 && code <= 6, "code must be one of DLPack's types, 0 to 6");
    require(bits == 8 || bits == 16 || bits == 32 || bits == 64 || bits == 128,
            "bits must be 8, 16, 32, 64 or 128");
    std::size_t bytes = static_cast<std::size_t>(bits) / 8;
    for (const std::int64_t size : row_shape) {
      require(size >= 0, "row_shape must hold sizes >= 0");
      bytes = bytes_of(static_cast<std::size_t>(size), bytes);
    }
    require(bytes == row_bytes, "row_bytes must be the size of row_shape in bytes");
  }

  std::shared_ptr<const std::vector<Column>> columns_;
  std::vector<Layout> layouts_;
  py::object owner_;
};

// Owns a slot while a tensor uses its memory.
struct SlotTensor {
  dlpack::ManagedTensor managed;
  std::vector<std::int64_t> shape;  // [N, *row_shape]
  Slot slot;
};

void delete_unused_capsule(PyObject* capsule) {
  // torch renames a capsule when it takes the tensor. A capsule with this name was never used.
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

py::object slot_tensor(Slot slot, const Columns::Layout& layout, std::size_t count) {
  auto made = std::make_unique<SlotTensor>();
  made->shape.reserve(layout.row_shape.size() + 1);
  made->shape.push_back(static_cast<std::int64_t>(count));
  made->shape.insert(made->shape.end(), layout.row_shape.begin(), layout.row_shape.end());
  made->managed.tensor = {.data = slot->data(),
                          .device = {dlpack::cpu, 0},
                          .ndim = static_cast<std::int32_t>(made->shape.size()),
                          .dtype = layout.dtype,
                          .shape = made->shape.data(),
                          .strides = nullptr,
                          .byte_offset = 0};
  made->slot = std::move(slot);
  made->managed.owner = made.get();
  made->managed.deleter = [](dlpack::ManagedTensor* managed) {
    const std::unique_ptr<SlotTensor> ended(static_cast<SlotTensor*>(managed->owner));
  };
  PyObject* capsule = PyCapsule_New(&made->managed, "dltensor", delete_unused_capsule);
  if (capsule == nullptr) throw py::error_already_set();
  [[maybe_unused]] SlotTensor* owned = made.release();  // the capsule owns it from here on
  return py::reinterpret_steal<py::object>(capsule);
}

// Batches of consecutive indices, gathered one after another.
class Batches {
 public:
  Batches(std::shared_ptr<Stager> stager, std::shared_ptr<const Columns> columns, std::uintptr_t indices,
          std::int64_t first, std::size_t count, std::size_t batches, py::object owner)
      : stager_(std::move(stager)),
        columns_(std::move(columns)),
        owner_(std::move(owner)),
        indices_(index_pointer(indices)),
        first_(first),
        count_(count),
        left_(batches) {
    const std::size_t rows = bytes_of(std::max<std::size_t>(batches, 1), count);
    for (const Column& column : *columns_->columns()) {
      bytes_of(count, column.row_bytes);
      // A row out of range is an error of its batch. Only a count beyond all rows is refused here.
      require(indices_ != nullptr || count <= static_cast<std::size_t>(column.first_rows.back()),
              "count must be at most the number of rows");
    }
    bytes_of(rows, sizeof(std::int64_t));
    require(first >= 0 && static_cast<std::size_t>(first) <= most_bytes, "first must be the index of a row");
  }

  // Waits for the jobs, because they read memory that this object keeps alive.
  ~Batches() {  // NOLINT(bugprone-exception-escape): a thread without the GIL could not continue
    const ReleaseGil nogil;
    for (const auto& batch : under_way_) {
      try {
        stager_->wait(*batch);
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
        // The error belongs to a batch that was never taken, or this is a forked child, where no job runs.
      }
    }
  }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  void start(std::size_t ahead) {
    require(ahead <= most_ahead, "ahead must be at most 65536");
    while (left_ > 0 && under_way_.size() < ahead) {
      under_way_.push_back(stager_->gather(columns_->columns(), indices_, first_, count_));
      if (indices_ != nullptr) indices_ += count_;
      first_ += static_cast<std::int64_t>(count_);
      --left_;
    }
  }

  std::vector<py::object> take(std::size_t ahead) {
    start(ahead + 1);
    if (under_way_.empty()) throw std::logic_error("all batches were taken");
    const std::shared_ptr<Gathered> batch = std::move(under_way_.front());
    under_way_.pop_front();
    {
      const ReleaseGil nogil;
      stager_->wait(*batch);
    }
    std::vector<py::object> capsules;
    capsules.reserve(batch->slots.size());
    for (std::size_t i = 0; i < batch->slots.size(); ++i)
      capsules.push_back(slot_tensor(std::move(batch->slots[i]), columns_->layouts()[i], count_));
    return capsules;
  }

 private:
  std::shared_ptr<Stager> stager_;
  std::shared_ptr<const Columns> columns_;
  py::object owner_;
  const std::int64_t* indices_;
  std::int64_t first_;
  std::size_t count_;
  std::size_t left_;  // batches that have not started
  std::deque<std::shared_ptr<Gathered>> under_way_;
};

// A batch that is being copied to the device, for Python.
class PyCopied {
 public:
  explicit PyCopied(std::shared_ptr<Copied> copied) : copied_(std::move(copied)) {}

  void wait() {
    const ReleaseGil nogil;
    copied_->ticket->wait();
  }

  void block(cuda::Stream stream) const {
    require(copied_->ticket->done(), "block must be called after wait");
    if (copied_->event) copied_->event->block(stream);
  }

  bool finished() const { return copied_->finished(); }

 private:
  std::shared_ptr<Copied> copied_;
};

// Stager that keeps the Python objects alive that its copies read and write.
class PyStager {
 public:
  PyStager(std::shared_ptr<Ring> ring, int threads, int device, std::size_t max_in_flight, int helpers)
      : device_(device),
        stager_(std::make_shared<Stager>(std::move(ring), threads, device, max_in_flight, helpers)) {
    require(threads <= most_threads, "threads must be at most 1024");
    require(helpers >= 0 && helpers <= most_threads, "helpers must be 0 to 1024");
    require(device >= host_device, "device must be the index of a GPU, or -1");
  }
  ~PyStager() { close(); }  // NOLINT(bugprone-exception-escape): a thread without the GIL could not continue
  PyStager(const PyStager&) = delete;
  PyStager& operator=(const PyStager&) = delete;

  std::unique_ptr<Batches> gather(std::shared_ptr<const Columns> columns, std::uintptr_t indices,
                                  std::int64_t first, std::size_t count, std::size_t batches,
                                  py::object owner) {
    return std::make_unique<Batches>(stager_, std::move(columns), indices, first, count, batches,
                                     std::move(owner));
  }

  PyCopied copy(const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& transfers,
                bool pinned_direct, cuda::Stream stream, cuda::EventHandle fence, py::object owner) {
    forget_ended();
    require(device_ != host_device || (stream == 0 && fence == 0), "stream and fence must be 0 on the host");
    std::vector<Transfer> jobs;
    jobs.reserve(transfers.size());
    std::size_t all_bytes = 0;
    for (const auto& [from, to, bytes] : transfers) {
      require(bytes == 0 || (from != 0 && to != 0), "addresses must not be 0");
      all_bytes = bytes_of(1, all_bytes + bytes_of(1, bytes));
      jobs.push_back({source_pointer(from), pointer(to), bytes});
    }
    auto copied = stager_->copy(std::move(jobs),
                                pinned_direct ? PinnedSources::direct : PinnedSources::staged, stream, fence);
    copies_.push_back({copied, std::move(owner)});
    return PyCopied(std::move(copied));
  }

  void close() {
    {
      const ReleaseGil nogil;
      stager_->close();
    }
    const auto ended = std::exchange(copies_, {});  // frees tensors, which may let another thread run
  }

 private:
  struct HeldCopy {
    std::shared_ptr<Copied> copied;
    py::object owner;
  };

  void forget_ended() {
    while (!copies_.empty() && copies_.front().copied->finished()) {
      const HeldCopy ended =
          std::move(copies_.front());  // freed after the pop, because this may let another thread run
      copies_.pop_front();
    }
  }

  const int device_;
  std::deque<HeldCopy> copies_;
  std::shared_ptr<Stager> stager_;  // last, so that its threads end before the other members
};

}  // namespace
}  // namespace flatout::prefetch

void flatout::bind_prefetch(py::module_& module) {
  using namespace prefetch;
  using py::arg;

  module.def("cuda_usable", &cuda::usable,
             "Return True if the CUDA runtime of this build works with the installed driver.");
  module.def("create_stream", &cuda::create_stream, arg("device"),
             "Return the address of a new non-blocking CUDA stream that lives as long as the process.");

  py::class_<Ring, std::shared_ptr<Ring>>(module, "Ring",
                                          "Reused host buffers: pinned for a device, or pageable.")
      .def(py::init([](int device, std::size_t max_idle) {
             require(device >= host_device, "device must be the index of a GPU, or -1");
             return std::shared_ptr<Ring>(new Ring(device, max_idle), delete_without_gil);
           }),
           arg("device"), arg("max_idle") = std::numeric_limits<std::size_t>::max())
      .def("clear", &Ring::clear, py::call_guard<ReleaseGil>(), "Free the idle buffers.")
      .def_property_readonly("device", &Ring::device,
                             "Index of the GPU that the memory is pinned for; -1 for pageable memory.")
      .def_property_readonly("idle", &Ring::idle, "Number of buffers that wait for reuse.")
      .def_property_readonly("allocations", &Ring::allocations, "Number of buffers made so far.");

  py::class_<Columns, std::shared_ptr<Columns>>(module, "Columns", "Tensors that batches are gathered from.")
      .def(py::init<const std::vector<Columns::Spec>&, py::object>(), arg("specs"), arg("owner"));

  py::class_<Batches>(module, "Batches", "Batches that are gathered in order.")
      .def("start", &Batches::start, arg("ahead"), "Begin to gather up to `ahead` batches.")
      .def("take", &Batches::take, arg("ahead"),
           "Begin up to `ahead` more batches, wait for the next one, and return its columns as DLPack "
           "capsules.");

  py::class_<PyCopied>(module, "Copied", "A batch on its way to the device.")
      .def("wait", &PyCopied::wait,
           "Wait until staged sources are read and the copies are enqueued. Raise the error of the copy.")
      .def("block", &PyCopied::block, arg("stream"), "Make later work on `stream` wait for the copies.")
      .def("finished", &PyCopied::finished, "Return True if the copies have ended.");

  py::class_<PyStager>(module, "Stager", "Threads that gather and copy batches in the order of the calls.")
      .def(py::init<std::shared_ptr<Ring>, int, int, std::size_t, int>(), arg("ring").none(false),
           arg("threads") = 1, arg("device") = host_device, arg("max_in_flight") = 4, arg("helpers") = 0)
      .def("gather", &PyStager::gather, arg("columns").none(false), arg("indices"), arg("first"),
           arg("count"), arg("batches"), arg("owner"),
           "Return `batches` batches of `count` rows each: those of indices[0], indices[1], ..., or those "
           "from "
           "`first` on if `indices` is 0. `owner` is kept alive until they are gathered.")
      .def("copy", &PyStager::copy, arg("transfers"), arg("pinned_direct"), arg("stream"), arg("fence"),
           arg("owner"),
           "Copy (from, to, bytes) triples on `stream` after `fence` has passed. `owner` is kept alive until "
           "then. "
           "`pinned_direct`: pinned sources are not written again, so they need no staging.")
      .def("close", &PyStager::close, "End the threads. A second call does nothing.");
  for (const char* name : {"Ring", "Columns", "Batches", "Copied", "Stager"})
    refuse_unmade(module.attr(name));
}
