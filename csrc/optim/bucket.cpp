// bucket.cpp: the tensors of optimizer steps, which are checked once, and the operators on numbered buckets.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "optim/coded.h"
#include "optim/step.h"

namespace flatout {
namespace {

bool is_16_bit(ScalarType dtype) { return dtype == ScalarType::Half || dtype == ScalarType::BFloat16; }

bool is_strided(const Tensor& tensor) {
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == strided;
}

// Returns detached tensors over the same memory. These aliases keep the memory even after `tensor.data =
// other`.
TensorList aliases_of(const TensorList& tensors) {
  TensorList aliases;
  aliases.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    StableIValue stack[] = {torch::stable::detail::from(tensor)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::detach", "", stack, TORCH_ABI_VERSION));
    aliases.push_back(torch::stable::detail::to<Tensor>(stack[0]));
  }
  return aliases;
}

// Returns a copy of a gradient with the strides of its weight.
Tensor copy_like(const Tensor& grad, const Tensor& weight) {
  Tensor copy = new_tensor(weight, grad.scalar_type(), weight.sizes(), weight.strides());
  torch::stable::copy_(copy, grad);
  return copy;
}

void check_steps(const TensorList& steps, const char* name, const TensorList& leader) {
  STD_TORCH_CHECK(steps.size() == leader.size(), name, " must hold as many tensors as weights (",
                  leader.size(), "), got ", steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    STD_TORCH_CHECK(
        (steps[i].scalar_type() == ScalarType::Float || steps[i].scalar_type() == ScalarType::Double) &&
            steps[i].numel() == 1 && same_device(steps[i], leader[i]),
        name, "[", i, "] must be one float32 or float64 number on the device of weights[", i, "]");
    check_memory(steps[i], name, i);
  }
}

}  // namespace

Bucket::Bucket(const std::string& rule, const TensorList& weights, const TensorList& states,
               const TensorList& absmaxes, const TensorList& steps, const TensorList& averages,
               const TensorList& lows, const std::vector<int64_t>& ids, const std::vector<int64_t>& groups)
    : rule_(rule_named(rule)), states_(0), steps_(steps) {
  check_leader(weights, "weights");
  const std::size_t count = weights.size();
  compute_ = weights[0].scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  grad_dtype_ = weights[0].scalar_type();
  device_type_ = device_type(weights[0]);
  device_ = weights[0].get_device_index();
  streams_.push_back({weights, 0, aliases_of(weights)});
  STD_TORCH_CHECK(states.size() % count == 0 && states.size() / count <= kMaxStates,
                  "states must hold 0 to 3 tensors per weight (", count, "), got ", states.size());
  states_ = static_cast<int>(states.size() / count);
  codes_ = !states.empty() && states[0].scalar_type() == ScalarType::Byte;
  STD_TORCH_CHECK(absmaxes.size() == (codes_ ? states.size() : 0),
                  "absmaxes must hold a tensor per state of 8 bits (", codes_ ? states.size() : 0, "), got ",
                  absmaxes.size());
  const auto stream_of = [count](const TensorList& tensors, int s) {
    const auto begin = tensors.begin() + static_cast<int64_t>(s * count);
    return TensorList{begin, begin + static_cast<int64_t>(count)};
  };
  for (int s = 0; s < states_; ++s) {
    add_stream(stream_of(states, s), "states", 2 + s);
    STD_TORCH_CHECK((streams_.back().tensors[0].scalar_type() == ScalarType::Byte) == codes_,
                    "states must be uint8 all or none");
    if (!codes_) continue;
    for (std::size_t i = 0; i < count; ++i)
      check_absmax(absmaxes[s * count + i], "absmaxes", s * count + i, weights[i], "weights");
    const TensorList stream = stream_of(absmaxes, s);
    streams_.push_back({stream, 4 + states_ + s, aliases_of(stream)});
  }
  if (!averages.empty()) {
    STD_TORCH_CHECK(averages[0].scalar_type() == compute_, "averages must be ",
                    torch::headeronly::toString(compute_));
    add_stream(averages, "averages", 2 + states_);
  }
  if (!lows.empty()) {
    const bool remainder = lows[0].scalar_type() == ScalarType::Short;
    low_ = remainder ? Low::kRemainder : Low::kCopy;
    STD_TORCH_CHECK(remainder || is_16_bit(lows[0].scalar_type()), "lows must be float16, bfloat16 or int16");
    STD_TORCH_CHECK(weights[0].scalar_type() == (remainder ? ScalarType::BFloat16 : ScalarType::Float),
                    remainder ? "weights with int16 remainders must be bfloat16"
                              : "weights with 16-bit copies must be float32");
    add_stream(lows, "lows", 3 + states_);
  }
  if (!steps.empty()) {
    check_steps(steps, "steps", weights);
    kept_steps_ = aliases_of(steps);
  }
  check_apart({{weights, "weights"},
               {states, "states"},
               {absmaxes, "absmaxes"},
               {steps, "steps"},
               {averages, "averages"},
               {lows, "lows"}});
  for (const auto& [numbers, name] : {std::pair(&ids, "ids"), std::pair(&groups, "groups")})
    STD_TORCH_CHECK(numbers->empty() || numbers->size() == count, name,
                    " must hold as many numbers as weights (", count, "), got ", numbers->size());
  flat_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const int64_t group = groups.empty() ? 0 : groups[i];
    STD_TORCH_CHECK(group >= 0 && group < kMaxGroups, "groups[", i, "] must be from 0 to ", kMaxGroups - 1,
                    ", got ", group);
    groups_ = std::max(groups_, static_cast<std::size_t>(group) + 1);
    flat_[i].group = static_cast<uint8_t>(group);
    flat_[i].numel = weights[i].numel();
    flat_[i].id = static_cast<uint32_t>(ids.empty() ? static_cast<int64_t>(i) : ids[i]);
    for (const Stream& stream : streams_) flat_[i].address[stream.slot] = stream.kept[i].data_ptr();
    if (!steps.empty()) {
      flat_[i].step = kept_steps_[i].data_ptr();
      flat_[i].step_is_double = steps[i].scalar_type() == ScalarType::Double;
    }
    contiguous_.push_back(weights[i].is_contiguous());
  }
  narrow_ = narrowest_stream();
}

void Bucket::add_stream(TensorList tensors, const char* name, int slot) {
  const TensorList& weights = streams_[0].tensors;
  STD_TORCH_CHECK(tensors.size() == weights.size(), name, " must hold as many tensors as weights (",
                  weights.size(), "), got ", tensors.size());
  const ScalarType dtype = tensors[0].scalar_type();
  const bool is_code = dtype == ScalarType::Byte && codes_ && compute_ == ScalarType::Float;
  const bool is_remainder = dtype == ScalarType::Short && low_ == Low::kRemainder;
  STD_TORCH_CHECK(dtype == compute_ || is_16_bit(dtype) || is_code || is_remainder, name, " must be ",
                  torch::headeronly::toString(compute_),
                  ", of 16 bits or (states beside float32) uint8, got ", torch::headeronly::toString(dtype));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(tensors[i].scalar_type() == dtype, name, "[", i,
                    "] must have the dtype of its neighbours");
    check_beside(tensors[i], name, i, weights[i], "weights");
  }
  TensorList kept = aliases_of(tensors);
  streams_.push_back({std::move(tensors), slot, std::move(kept)});
}

ScalarType Bucket::narrowest_stream() const {
  ScalarType found = compute_;
  for (const Stream& stream : streams_) {
    const ScalarType dtype = stream.kept[0].scalar_type();
    if (!is_16_bit(dtype)) continue;
    STD_TORCH_CHECK(compute_ == ScalarType::Float, "float64 weights have no 16-bit companions");
    STD_TORCH_CHECK(found == compute_ || found == dtype,
                    "one bucket cannot hold both float16 and bfloat16 tensors");
    found = dtype;
  }
  return found;
}

Storage Bucket::storage() const {
  Storage storage{};
  for (const Stream& stream : streams_)
    if (stream.kept[0].scalar_type() == compute_) storage.wide |= 1u << stream.slot;
  if (grad_dtype_ == compute_) storage.wide |= 2u;
  storage.average = (storage.wide >> (2 + states_) & 1u) != 0;
  storage.low = low_;
  storage.codes = codes_;
  return storage;
}

bool Bucket::has_moved(std::size_t tensor) const {
  const FlatTensor& flat = flat_[tensor];
  for (const Stream& stream : streams_)
    if (stream.tensors[tensor].data_ptr() != flat.address[stream.slot]) return true;
  return !steps_.empty() && steps_[tensor].data_ptr() != flat.step;
}

// Called for thousands of tensors in every step, so facts about the weights are cached.
Bucket::Fit Bucket::fit(const Tensor& grad, ScalarType dtype, std::size_t tensor) const {
  if (has_moved(tensor)) return Fit::kMoved;
  if (!is_strided(grad) || grad.scalar_type() != dtype || device_type(grad) != device_type_ ||
      grad.get_device_index() != device_)
    return Fit::kNotNative;
  const Tensor& weight = streams_[0].kept[tensor];
  const auto sizes = grad.sizes(), expected = weight.sizes();
  if (sizes.size() != expected.size() || !std::equal(sizes.begin(), sizes.end(), expected.begin()))
    return Fit::kNotNative;
  return (contiguous_[tensor] && grad.is_contiguous()) || same_layout(grad, weight) ? Fit::kReady
                                                                                    : Fit::kCopied;
}

Bucket::Fit Bucket::set_grads(TensorList grads, const std::vector<int64_t>& which) {
  grads_.clear();
  if (grads.empty() && which.empty()) return Fit::kReady;
  const std::size_t count = which.empty() ? flat_.size() : which.size();
  STD_TORCH_CHECK(grads.size() == count, "grads must hold one tensor per weight (", count, "), got ",
                  grads.size());
  const ScalarType dtype = is_strided(grads[0]) ? grads[0].scalar_type() : ScalarType::Short;
  if (dtype != compute_ && !(is_16_bit(dtype) && (narrow_ == dtype || narrow_ == ScalarType::Float)))
    return Fit::kNotNative;
  const std::size_t element_size = grads[0].element_size();
  Fit worst = Fit::kReady;
  some_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = which.empty() ? i : static_cast<std::size_t>(which[i]);
    STD_TORCH_CHECK(at < flat_.size() && (i == 0 || which.empty() || which[i] > which[i - 1]), "which[", i,
                    "] must be below ", flat_.size(), " and above the previous index, got ", at);
    const Fit here = fit(grads[i], dtype, at);
    if (here == Fit::kMoved || here == Fit::kNotNative) return here;
    if (here == Fit::kCopied) {
      grads[i] = copy_like(grads[i], streams_[0].kept[at]);
      worst = here;
    }
    STD_TORCH_CHECK(has_memory(grads[i], flat_[at].numel, element_size), "grads[", i,
                    "] must have storage for ", flat_[at].numel, " elements. Resize its storage back");
    flat_[at].address[1] = grads[i].data_ptr();
    if (!which.empty()) some_.push_back(flat_[at]);
  }
  grad_dtype_ = dtype;
  grads_ = std::move(grads);
  which_ = which;
  return worst;
}

void Bucket::add_grad_extents(std::vector<Extent>& extents) const {
  std::size_t size = 0;
  with_dtype(grad_dtype_, [&]<class T>(T*) { size = sizeof(T); });
  for (const FlatTensor& tensor : held()) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.address[1]);
    if (tensor.numel != 0) extents.push_back({begin, begin + tensor.numel * size});
  }
}

bool Bucket::are_apart(std::vector<Extent> extents) {
  // Sorting thousands of addresses takes longer than a step over small tensors. Most steps have the same
  // addresses as the step before.
  if (extents == apart_) return true;
  std::vector<Extent> sorted = extents;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i - 1].second > sorted[i].first) return false;
  apart_ = std::move(extents);
  return true;
}

void Bucket::step(const StepNumbers& numbers) {
  // The gradients are released even if the step throws.
  const TensorList grads = std::exchange(grads_, {});
  if (grads.empty()) return;
  for (const std::size_t size : {numbers.lrs.size(), numbers.lr_tensors.size(), numbers.weight_decays.size()})
    STD_TORCH_CHECK(size == groups_, "lrs, lr_tensors and weight_decays must hold a value per group (",
                    groups_, "), got ", size);
  StepConfig config;
  for (std::size_t i = 0; i < groups_; ++i)
    config.group[i] = {device_scalar(numbers.lr_tensors[i], "lr_tensors", leader(), numbers.lrs[i]),
                       numbers.weight_decays[i]};
  config.grad_factor = device_scalar(numbers.grad_factor, "grad_factor", leader(), 1);
  config.found_inf = device_flag(numbers.found_inf, "found_inf", leader());
  config.maximize = numbers.maximize;
  config.unscale_grads = numbers.unscale_grads;
  config.ema_decay = numbers.ema_decay;
  config.stochastic = numbers.seed.has_value();
  config.seed = static_cast<uint64_t>(numbers.seed.value_or(0));
  STD_TORCH_CHECK(!config.stochastic || !steps_.empty(), "steps must be given with a seed");
  const ScalarType dtype = is_16_bit(grad_dtype_) ? grad_dtype_ : narrow_;
  STD_TORCH_CHECK(!config.stochastic || dtype == ScalarType::BFloat16,
                  "a seed rounds bfloat16 tensors stochastically, and there are none");
  run(rule_, states_, dtype, storage(), config, numbers.options, chosen());
}

namespace {

class Registry {
 public:
  int64_t keep(std::shared_ptr<Bucket> bucket) {
    const std::lock_guard lock(mutex_);
    buckets_[++last_] = std::move(bucket);
    return last_;
  }
  std::shared_ptr<Bucket> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = buckets_.find(number);
    STD_TORCH_CHECK(found != buckets_.end(), "there is no bucket ", number);
    return found->second;
  }
  std::shared_ptr<Bucket> remove(int64_t number) {  // to be destroyed outside the lock
    const std::lock_guard lock(mutex_);
    auto node = buckets_.extract(number);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Bucket>> buckets_;
  int64_t last_ = 0;
};

// Never destroyed, because the tensors must not be freed after torch's static objects.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

// Moves from `grads`, because torch has made this list for the call.
int64_t set_grads(int64_t bucket, TensorList& grads, const std::vector<int64_t>& which) {
  return static_cast<int64_t>(registry().find(bucket)->set_grads(std::move(grads), which));
}

void step_bucket_(int64_t bucket, const std::vector<double>& options, const std::vector<double>& lrs,
                  const std::vector<std::optional<Tensor>>& lr_tensors,
                  const std::vector<double>& weight_decays, bool maximize, double ema_decay,
                  std::optional<int64_t> seed, const std::optional<Tensor>& grad_factor,
                  const std::optional<Tensor>& found_inf, bool unscale_grads) {
  registry().find(bucket)->step({options, lrs, lr_tensors, weight_decays, maximize, ema_decay, seed,
                                 grad_factor, found_inf, unscale_grads});
}

bool grads_are_apart(const std::vector<int64_t>& numbers) {
  STD_TORCH_CHECK(!numbers.empty(), "buckets must hold at least one number");
  std::vector<std::shared_ptr<Bucket>> buckets;
  std::vector<Bucket::Extent> extents;
  for (const int64_t number : numbers) {
    buckets.push_back(registry().find(number));
    buckets.back()->add_grad_extents(extents);
  }
  return buckets[0]->are_apart(std::move(extents));
}

void free_bucket(int64_t bucket) { registry().remove(bucket); }

}  // namespace

int64_t keep_bucket(std::shared_ptr<Bucket> bucket) { return registry().keep(std::move(bucket)); }
std::shared_ptr<Bucket> find_bucket(int64_t number) { return registry().find(number); }

namespace {

// Rejects gradients whose memory does not hold their values: zero tensors, and tensors with torch's negation
// bit. torch would pass copies that do not outlive the call.
int64_t not_in_memory(int64_t, const TensorList&, const std::vector<int64_t>&) {
  return static_cast<int64_t>(Bucket::Fit::kNotNative);
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, ZeroTensor, m) { m.impl("set_grads", TORCH_BOX(&flatout::not_in_memory)); }

STABLE_TORCH_LIBRARY_IMPL(flatout, Negative, m) { m.impl("set_grads", TORCH_BOX(&flatout::not_in_memory)); }

STABLE_TORCH_LIBRARY_IMPL(flatout, CompositeExplicitAutograd, m) {
  m.impl("set_grads", TORCH_BOX(&flatout::set_grads));
  m.impl("step_bucket_", TORCH_BOX(&flatout::step_bucket_));
  m.impl("grads_are_apart", TORCH_BOX(&flatout::grads_are_apart));
  m.impl("free_bucket", TORCH_BOX(&flatout::free_bucket));
}
