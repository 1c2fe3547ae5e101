// Ranks that wait leave their cores to others: to whoever they wait for.

#ifndef HOROVOD_WAITING_H
#define HOROVOD_WAITING_H

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

namespace horovod {
namespace common {

// Yields at first, which has the lowest latency and takes a whole core, for a
// shorter time where ranks share their cores. Then sleeps a sixteenth of the
// time waited, 10 us to `longest`.
template <class Done>
void WaitUntil(Done done, bool shares_cores,
               std::chrono::nanoseconds longest) {
  const std::chrono::nanoseconds shortest = std::chrono::microseconds(10);
  const std::chrono::nanoseconds yields =
      std::chrono::microseconds(shares_cores ? 50 : 2000);
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    const std::chrono::nanoseconds waited =
        std::chrono::steady_clock::now() - begin;
    if (waited < yields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(
          std::min(std::max(waited / 16, shortest), longest));
    }
  }
}

#ifdef __linux__
// The cores that the quotas of this process's control groups allow; 0 where
// there are none.
inline double CoresOfQuota() {
  double cores = 0;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    auto group = line.substr(second + 1);
    bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) {
      continue;
    }
    // In a container the path is the host's, and the group is the root.
    for (bool more = true; more;) {
      more = group.size() > 1;
      auto folder = "/sys/fs/cgroup" + std::string(v2 ? "" : "/cpu") + group;
      double quota = 0, period = 0;
      if (v2) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;
      } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
      }
      if (quota > 0 && period > 0) {
        cores = cores > 0 ? std::min(cores, quota / period) : quota / period;
      }
      group.resize(more ? group.rfind('/') : 0);
    }
  }
  return cores;
}
#endif

// How many cores this process may use, and a number that only processes of
// this host that may use the same ones have.
inline std::array<int, 2> AllowedCores() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  int cores = std::max(1, (int)std::thread::hardware_concurrency());
  std::string which = host;
#ifdef __linux__
  // Containers of one machine have names of their own, and the same cores.
  std::ifstream("/proc/sys/kernel/random/boot_id") >> which;
  std::vector<cpu_set_t> set(16); // 16384 cores
  const size_t bytes = set.size() * sizeof(cpu_set_t);
  if (sched_getaffinity(0, bytes, set.data()) == 0) {
    cores = CPU_COUNT_S(bytes, set.data());
    which.append((const char*)set.data(), bytes);
  }
  double quota = CoresOfQuota();
  if (quota > 0 && quota < cores) {
    cores = std::max(1, (int)quota);
    which = host; // its ranks share the quota, also where they are bound
  }
#endif
  return {cores, (int)std::hash<std::string>()(which)};
}

// Whether some ranks share cores, by what AllowedCores() gives on all ranks: a
// rank is two busy threads, its own and Horovod's.
inline bool ShareCores(const std::vector<int>& allowed) {
  for (size_t i = 0; i < allowed.size(); i += 2) {
    int threads = 0;
    for (size_t j = 1; j < allowed.size(); j += 2) {
      threads += allowed[j] == allowed[i + 1] ? 2 : 0;
    }
    if (threads > allowed[i]) {
      return true;
    }
  }
  return false;
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_WAITING_H
