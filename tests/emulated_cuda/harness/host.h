// host.h: launchers that run the blocks and threads of kernels on the host, one by one.
#pragma once

#include <vector>

#include "images/normalize_thread.h"
#include "optim/rules.h"
#include "optim/storage.h"
#include "scaling/check_chunk.h"
#include "scaling/conclusion.h"

namespace harness {

template <class T>
void step_on_host(flatout::RuleName rule, int states, const flatout::Storage& storage,
                  const flatout::StepConfig& common, const std::vector<double>& options,
                  const std::vector<flatout::FlatTensor>& tensors);

template <class T>
void check_on_host(const std::vector<flatout::FlatTensor>& tensors, flatout::Norm norm, bool rewrite,
                   const flatout::Conclusion& conclusion, uint32_t first_partial);
template <class T>
void norms_on_host(const std::vector<flatout::FlatTensor>& tensors, flatout::Norm norm,
                   const flatout::Norms& norms);
template <class T>
void scale_on_host(const std::vector<flatout::FlatTensor>& tensors, const flatout::DeviceScalar& factor);

template <class T>
void normalize_on_host(const flatout::ImageBatch& batch, const flatout::Channel* channels);

}  // namespace harness
