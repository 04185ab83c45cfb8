// bindings.cpp: bindings of RowStates for Python.
#include "core/bindings.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "cache/row_states.h"

namespace py = pybind11;

void flatout::bind_cache(py::module_& module) {
  using cache::RowStates;
  using py::arg;

  py::class_<RowStates>(module, "RowStates", "One byte for each row of a table that processes share.")
      .def(
          py::init([](std::uintptr_t address, std::size_t rows, const py::object& /*owner*/) {
            if (address == 0 && rows != 0) throw std::invalid_argument("address must not be 0");
            if (rows > std::size_t{1} << 56) throw std::invalid_argument("rows must be at most 2^56");
            // NOLINTNEXTLINE(performance-no-int-to-ptr): tensor.data_ptr() is an integer
            return RowStates(reinterpret_cast<std::uint8_t*>(address), rows);
          }),
          py::keep_alive<1, 4>(), arg("address"), arg("rows"), arg("owner"),
          "Use `rows` bytes at `address`, which must be zero at first. `owner` is kept alive. The address is "
          "not checked.")
      .def("claim", &RowStates::claim, arg("row"),
           "Return True if the caller may write the row, and False if another caller has claimed it.")
      .def("complete", &RowStates::complete, arg("row"), "Mark a claimed row as written.")
      .def("give_up", &RowStates::give_up, arg("row"), "Mark a claimed row as never to be written.")
      .def("is_complete", &RowStates::is_complete, arg("row"));
  refuse_unmade(module.attr("RowStates"));
}
