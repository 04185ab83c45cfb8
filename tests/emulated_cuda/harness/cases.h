// cases.h: the cases of the test, and the report of a case.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace harness {

// Failures of a case.
class Report {
 public:
  void fail(const std::string& message);
  void expect(bool condition, const char* message) {
    if (!condition) fail(message);
  }
  int failures() const { return failures_; }

 private:
  int failures_ = 0;
};

struct Case {
  std::string name;
  bool is_small;  // for ThreadSanitizer, where a kernel takes 100 times as long
  std::function<void(Report&)> run;
};

void add_step_cases(std::vector<Case>& cases);
void add_check_cases(std::vector<Case>& cases);
void add_coded_cases(std::vector<Case>& cases);
void add_norms_cases(std::vector<Case>& cases);
void add_image_cases(std::vector<Case>& cases);
void add_intrinsic_cases(std::vector<Case>& cases);

}  // namespace harness
