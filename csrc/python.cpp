// python.cpp: bindings of the stateful classes, with pybind11 and without torch. Tensors are passed as
// pointers or by DLPack.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/bindings.h"
#include "core/cuda_versions.h"

PYBIND11_MODULE(_host, m) {
  m.doc() = "Native, torch-free classes of flatout.";
#ifdef FLATOUT_WITH_CUDA
  m.attr("built_with_cuda") = true;
#else
  m.attr("built_with_cuda") = false;
#endif
  m.def("cuda_versions", &flatout::cuda_versions);
  m.def("needed_driver", &flatout::needed_driver, pybind11::arg("runtime"));
  flatout::bind_signatures(m);
  flatout::bind_mfu(m);
  flatout::bind_prefetch(m);
  flatout::bind_cache(m);
}
