// step_test.cpp: runs a step on a device and on the host from the same bytes, and compares.
#include "step_test.h"

#include "host.h"
#include "optim/step_launch.h"
#include "scaling/check_launch.h"
#include "step_definition.h"
#include "stream.h"

namespace harness {

using namespace flatout;

namespace {

// Calls body with the gradients' type.
template <class T, class Body>
void with_gradients(const StepTest& test, const Body& body) {
  test.storage.is_wide(1) ? body(static_cast<compute_t<T>*>(nullptr)) : body(static_cast<T*>(nullptr));
}

template <class T>
void step_test_on_device(const StepTest& test, const Memory& memory, const Regions& regions,
                         cudaStream_t stream) {
  const std::vector<FlatTensor> tensors = flat_tensors(test, memory);
  if (test.max_norm >= 0) {
    const Conclusion conclusion = conclusion_of(test, memory, regions);
    with_gradients<T>(test, [&]<class G>(G*) {
      launch_check<G>(gradients_of(tensors), Norm::kTwo, false, conclusion, 0, stream);
    });
  }
  const Optimizer& optimizer = test.optimizer;
  const bool known = launch_step<T>(optimizer.rule, optimizer.states(), test.storage,
                                    step_config(test, memory), optimizer.options(), tensors,
                                    table_at(memory.at(common(test, kTable)), tensors.size()), stream);
  if (!known) throw std::runtime_error("the launcher does not know the rule");
}

template <class T>
void step_test_on_host(const StepTest& test, const Memory& memory, const Regions& regions) {
  const std::vector<FlatTensor> tensors = flat_tensors(test, memory);
  if (test.max_norm >= 0) {
    const Conclusion conclusion = conclusion_of(test, memory, regions);
    with_gradients<T>(test, [&]<class G>(G*) {
      check_on_host<G>(gradients_of(tensors), Norm::kTwo, false, conclusion, 0);
    });
  }
  const Optimizer& optimizer = test.optimizer;
  step_on_host<T>(optimizer.rule, optimizer.states(), test.storage, step_config(test, memory),
                  optimizer.options(), tensors);
}

}  // namespace

template <class T>
void run_step_test(const StepTest& test, Report& report) {
  const Stream stream(test.device);
  Regions before = make_regions<T>(test);
  const Memory host(before, Memory::Place::kHost);
  const std::size_t table = common(test, kTable);
  // The table's bytes are written by a kernel below.
  const std::vector<char> size(table_image(flat_tensors(test, host)).size(), '\x55');
  Regions with_table = before;
  with_table[table] = region_of(size);
  const Memory device(with_table, Memory::Place::kDevice);
  const std::vector<char> image = table_image(flat_tensors(test, device));
  launch_write(device.at(table), image.data(), image.size(), stream);
  for (int step = 0; step < test.steps; ++step) {
    step_test_on_device<T>(test, device, before, stream);
    step_test_on_host<T>(test, host, before);
    stream.synchronize();
    Regions after = device.read();
    report.expect(after[table].bytes == image, "the table has changed, or its ticket is not 0");
    after[table] = {};
    const Regions expected = host.read();
    for (std::size_t i = 0; i < after.size(); ++i)
      if (after[i] != expected[i])
        report.fail("tensor " + std::to_string(i / region(1, 0)) + ", stream " +
                    std::to_string(i % region(1, 0)) + " differs from the host's bits");
    DefinitionCheck<T>(test, before, after, report).run();
    before = after;
  }
}

template void run_step_test<float>(const StepTest&, Report&);
template void run_step_test<double>(const StepTest&, Report&);
template void run_step_test<f16>(const StepTest&, Report&);
template void run_step_test<bf16>(const StepTest&, Report&);

}  // namespace harness
