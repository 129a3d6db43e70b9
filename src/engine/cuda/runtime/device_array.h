#pragma once

#include <cstdint>
#include <vector>

namespace uniep::cuda {

// Device memory that a program fills and reads step by step: every function waits until it is done.
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(int device, int64_t bytes);
  DeviceArray(int device, const void* values, int64_t bytes);  // a copy of host memory
  ~DeviceArray();
  DeviceArray(DeviceArray&& other) noexcept;
  DeviceArray& operator=(DeviceArray&& other) noexcept;

  int device() const { return device_; }
  void* data() const { return memory_; }
  int64_t bytes() const { return bytes_; }
  void fill(unsigned char byte) const;
  void read(void* values, int64_t bytes) const { read_device(device_, memory_, values, bytes); }

  // Copies from any memory of a device to the host.
  static void read_device(int device, const void* memory, void* values, int64_t bytes);

 private:
  int device_ = 0;
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// Time between two points of the default streams of several devices.
class DeviceTimer {
 public:
  explicit DeviceTimer(const std::vector<int>& devices);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  void start();
  void stop();
  // Waits for the second point. Of the device that took longest.
  double milliseconds();

 private:
  struct Device {
    int device;
    void *begin, *end;
  };
  std::vector<Device> devices_;
};

}  // namespace uniep::cuda
