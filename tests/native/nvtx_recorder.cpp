// nvtx_recorder.cpp: an NVTX tool that writes the ranges it hears of to the file that NVTX_RECORDER names.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>

namespace {

std::FILE* record() {
  static std::FILE* file = std::fopen(std::getenv("NVTX_RECORDER"), "w");
  return file;
}

int depth = 0;

int push(const char* name) {
  std::fprintf(record(), "%*s%s\n", 2 * depth, "", name);
  std::fflush(record());
  return depth++;
}

int pop() { return --depth; }

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size))
    return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
