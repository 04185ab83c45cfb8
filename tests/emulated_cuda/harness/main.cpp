// main.cpp: runs the cases. Arguments: [--only NAME] [--small].
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>

#include "cases.h"

namespace harness {

void Report::fail(const std::string& message) {
  constexpr int kMostPrinted = 5;
  if (++failures_ <= kMostPrinted) std::printf("  FAILED: %s\n", message.c_str());
}

namespace {

bool passes(const Case& one) {
  const auto begin = std::chrono::steady_clock::now();
  Report report;
  try {
    one.run(report);
  } catch (const std::exception& error) {
    report.fail(error.what());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%-6s %6.2f s  %s\n", report.failures() == 0 ? "ok" : "FAILED", seconds.count(),
              one.name.c_str());
  std::fflush(stdout);
  return report.failures() == 0;
}

}  // namespace
}  // namespace harness

int main(int count, char** arguments) {
  const char* only = "";
  bool small = false;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--small") == 0) {
      small = true;
    } else if (std::strcmp(arguments[i], "--only") == 0 && i + 1 < count) {
      only = arguments[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--only PART_OF_NAME] [--small]\n", arguments[0]);
      return 2;
    }
  }
  std::vector<harness::Case> cases;
  harness::add_step_cases(cases);
  harness::add_check_cases(cases);
  harness::add_norms_cases(cases);
  harness::add_coded_cases(cases);
  harness::add_image_cases(cases);
  harness::add_intrinsic_cases(cases);
  int run = 0, failed = 0;
  for (const harness::Case& one : cases) {
    if ((small && !one.is_small) || one.name.find(only) == std::string::npos) continue;
    ++run;
    failed += harness::passes(one) ? 0 : 1;
  }
  std::printf("%d cases, %d failed\n", run, failed);
  return failed == 0 && run != 0 ? 0 : 1;
}
