// image_cases.cpp: normalizes images on a device, and compares with the formula and with the host.
#include "cases.h"
#include "host.h"
#include "images/normalize_launch.h"
#include "memory.h"
#include "numbers.h"
#include "stream.h"

namespace harness {

using namespace flatout;

namespace {

enum : std::size_t { kIn, kOut };

struct ImageTest {
  int64_t images, channels, pixels;
  Order in, out;
  std::size_t misalignment = 0;  // of the input, in bytes
  int device = 0;

  // With one channel or one pixel both orders are the same.
  Order in_order() const { return channels == 1 || pixels == 1 ? Order::kInterleaved : in; }
  Order out_order() const { return channels == 1 || pixels == 1 ? Order::kInterleaved : out; }
  ImageBatch batch(const Memory& memory) const {
    return {memory.at<uint8_t>(kIn), memory.at(kOut), images, channels, pixels, in_order(), out_order()};
  }
  std::size_t place(Order order, int64_t image, int64_t channel, int64_t pixel) const {
    const int64_t first = image * channels * pixels;
    return static_cast<std::size_t>(
        first + (order == Order::kPlanar ? channel * pixels + pixel : pixel * channels + channel));
  }
};

template <class T>
void run(const ImageTest& test, Report& report) {
  std::mt19937 random(4);
  const auto count = static_cast<std::size_t>(test.images * test.channels * test.pixels);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  std::vector<double> mean(static_cast<std::size_t>(test.channels)), deviation(mean.size());
  std::vector<Channel> channels(mean.size());
  for (std::size_t c = 0; c < mean.size(); ++c) {
    mean[c] = 0.4 + 0.001 * static_cast<double>(c);
    deviation[c] = 0.2 + 0.003 * static_cast<double>(c);
    channels[c] = Channel::of(mean[c], deviation[c]);
  }
  const Regions before{region_of(bytes, test.misalignment), region_of(std::vector<T>(count, nearest<T>(99)))};
  const Stream stream(test.device);
  const Memory device(before, Memory::Place::kDevice), host(before, Memory::Place::kHost);
  launch_normalize<T>(test.batch(device), channels.data(), stream);
  normalize_on_host<T>(test.batch(host), channels.data());
  stream.synchronize();
  const Regions after = device.read();
  report.expect(after == host.read(), "the host's bits differ");
  for (int64_t image = 0; image < test.images; ++image)
    for (int64_t c = 0; c < test.channels; ++c)
      for (int64_t pixel = 0; pixel < test.pixels; ++pixel) {
        const float byte = bytes[test.place(test.in, image, c, pixel)];
        const auto channel = static_cast<std::size_t>(c);
        // Each of the three operations is rounded to float32, as torchvision's are.
        const float value =
            (byte / 255.0f - static_cast<float>(mean[channel])) / static_cast<float>(deviation[channel]);
        const double got = number_of(elements<T>(after[kOut])[test.place(test.out, image, c, pixel)]);
        if (got != number_of(nearest<T>(value))) report.fail("a pixel is " + std::to_string(got));
      }
}

template <class T>
void add_cases_of(std::vector<Case>& cases, bool is_small) {
  const char* orders[] = {"planar", "interleaved"};
  for (const int64_t channels : {1, 2, 3, 4, 5, 240})
    for (const Order in : {Order::kPlanar, Order::kInterleaved})
      for (const Order out : {Order::kPlanar, Order::kInterleaved}) {
        const std::string name = "normalize " + std::to_string(channels) + " channels, " +
                                 orders[static_cast<int>(in)] + " to " + orders[static_cast<int>(out)] +
                                 ", " + kName<T>;
        cases.push_back({name, is_small, [=](Report& report) {
                           for (const int64_t pixels : {1, 7, 16, channels < 9 ? 33 * 17 : 33})
                             for (const std::size_t misalignment : {0, 1, 4})
                               run<T>({3, channels, pixels, in, out, misalignment}, report);
                         }});
      }
}

}  // namespace

void add_image_cases(std::vector<Case>& cases) {
  add_cases_of<float>(cases, false);
  add_cases_of<f16>(cases, false);
  add_cases_of<bf16>(cases, true);
  cases.push_back({"normalize nothing", true,
                   [](Report& report) { run<float>({0, 3, 16, Order::kPlanar, Order::kPlanar}, report); }});
  cases.push_back({"normalize on the last device", true, [](Report& report) {
                     run<float>({2, 3, 4096, Order::kPlanar, Order::kInterleaved, 0, last_device()}, report);
                   }});
}

}  // namespace harness
