// What containers and policies refuse: each facility is taken away by a seccomp filter in the
// ranks, and the group must come together all the same, by the replacement, and say so.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <fstream>

#include "communicator/bootstrap.h"
#include "forked_ranks.h"
#include "platform/sockets.h"
#include "transport/tcp/membership.h"

namespace pycomm {
namespace {

using test::all_reduce;

// From now on `number` fails with EPERM in this process. Needs no privilege.
bool refuse_system_call(int number) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{sizeof filter / sizeof filter[0], filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Runs an all_reduce of both kinds of size with `number` refused in the ranks that `applies` names,
// and returns the transport and whether anything was staged.
struct Seen {
  std::string transport;
  bool staged = false;
  bool direct = false;
};

int exercise(Communicator& comm, Seen* seen) {
  for (const std::uint64_t count : {2ull, 500'000ull}) {
    std::vector<float> data(count, static_cast<float>(comm.rank() + 1));
    if (!comm.run(all_reduce(data.data(), count)).is_ok()) return 1;
    if (data[0] != 3.0f || data[count - 1] != 3.0f) return 2;
  }
  // A message between two ranks, of memory that is read where it lies if that may be.
  std::vector<float> given(500'000, 1.0f), taken(500'000);
  OpRequest send, recv;
  send.kind = OpKind::kSend;
  recv.kind = OpKind::kRecv;
  send.dtype = recv.dtype = DType::kFloat32;
  send.count = recv.count = given.size();
  send.root = recv.root = 1 - comm.rank();
  send.input = reinterpret_cast<const std::byte*>(given.data());
  recv.output = reinterpret_cast<std::byte*>(taken.data());
  const std::uint64_t direct_before = comm.peer_stats().at(0).counters.bytes_direct;
  const auto going = comm.start(send);
  if (!comm.run(recv).is_ok() || !going->wait().is_ok() || taken.back() != 1.0f) return 4;
  PeerStats stats = comm.peer_stats().at(0);
  stats.counters.bytes_direct -= direct_before;
  *seen = {stats.transport, stats.counters.bytes_staged > 0, stats.counters.bytes_direct > 0};
  return 0;
}

std::vector<int> run_refused(int number, Rank only_rank,
                             const std::function<bool(Rank, const Seen&)>& expect) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    if ((only_rank < 0 || rank == only_rank) && !refuse_system_call(number)) return 60;
    Options options;
    options.timeout_ms = 20'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (!comm.is_ok()) {
      std::fprintf(stderr, "rank %d: %s\n", rank, comm.status().to_string().c_str());
      return 70;
    }
    Seen seen;
    const int status = exercise(*comm.value(), &seen);
    return status != 0 ? status : expect(rank, seen) ? 0 : 3;
  });
  std::filesystem::remove_all(folder);
  return results;
}

const std::vector<int> kBothFine{0, 0};

TEST(RestrictedHost, WithoutProcessVmReadvLargeMessagesAreStaged) {
  EXPECT_EQ(run_refused(SYS_process_vm_readv, -1,
                        [](Rank, const Seen& seen) {
                          return seen.transport == "shm" && seen.staged && !seen.direct;
                        }),
            kBothFine);
}

TEST(RestrictedHost, OneRankThatMayNotReadIsEnoughForStagingThatWay) {
  EXPECT_EQ(
      run_refused(SYS_process_vm_readv, 1,
                  [](Rank, const Seen& seen) { return seen.transport == "shm" && seen.staged; }),
      kBothFine);
}

TEST(RestrictedHost, WithoutMemfdRanksTalkOverTcp) {
  for (const Rank only : {-1, 0, 1}) {
    EXPECT_EQ(run_refused(SYS_memfd_create, only,
                          [](Rank, const Seen& seen) { return seen.transport == "tcp"; }),
              kBothFine);
  }
}

TEST(RestrictedHost, WithoutMembarrierSleepersLookAgainByThemselves) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    if (!refuse_system_call(SYS_membarrier)) return 60;
    Options options;
    options.timeout_ms = 20'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (!comm.is_ok()) return 70;
    for (int i = 0; i < 40; ++i) {
      if (rank == i % 2) platform::sleep_ns(3'000'000);  // the other one goes to sleep on it
      if (!comm.value()->run(OpRequest{}).is_ok()) return 1;
    }
    return 0;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, kBothFine);
}

TEST(RestrictedHost, AskingForShmWhereThereIsNoneSaysWhy) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    if (rank == 1 && !refuse_system_call(SYS_memfd_create)) return 60;
    Options options;
    options.transport = TransportChoice::kShm;
    options.timeout_ms = 5'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (comm.is_ok()) return 1;
    return comm.status().message().find("memfd_create") != std::string::npos ? 0 : 2;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, kBothFine);
}

// What the port's neighbours may try while a group comes together over TCP: nothing, noise, the
// right protocol with a wrong secret, a connection that never ends. None may hold it up or get in.
TEST(RestrictedHost, StrangersOnTheTcpPortNeitherJoinNorDelayTheGroup) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(3, [&](Rank rank) {
    auto store = make_file_store(folder);
    if (rank < 2) {
      if (rank == 1) platform::sleep_ns(800'000'000);
      Options options;
      options.transport = TransportChoice::kTcp;
      options.timeout_ms = 20'000;
      auto comm = Communicator::create(*store, rank, 2, options);
      if (!comm.is_ok()) return 70;
      Seen seen;
      return exercise(*comm.value(), &seen);
    }
    auto text = store->get("pycomm/default/0", 10'000);
    const auto hello = communicator::decode(text.value()).value();
    std::vector<platform::UniqueFd> open;
    for (int i = 0; i < 120; ++i) {  // more than the acceptor keeps
      const auto deadline = platform::real_clock().now_ns() + base::ms_to_ns(5'000);
      auto stream = platform::connect_tcp("127.0.0.1", hello.tcp_port, deadline);
      if (!stream.is_ok()) return 1;
      std::string noise(200, static_cast<char>('A' + i));
      if (i % 4 == 1) {
        noise = transport::tcp::Membership::connector("a wrong secret", std::string(32, 'c'),
                                                      hello.process_id, std::string(32, '0'))
                    .start() +
                std::string(32, 'x');
      }
      if (i % 4 != 0) {
        [[maybe_unused]] auto ignored = write(stream.value().get(), noise.data(), noise.size());
      }
      if (i % 4 == 2) continue;  // closes at once
      open.push_back(std::move(stream).value());
    }
    platform::sleep_ns(1'500'000'000);
    // Whoever sent something wrong has been cut off; what it got is at most one challenge and the
    // reason in words.
    int cut_off = 0;
    for (std::size_t i = 0; i < open.size(); ++i) {
      char buffer[512];
      std::size_t got = 0;
      for (;;) {
        const auto result = platform::read_some(open[i].get(), buffer, sizeof buffer);
        if (result.outcome == platform::IoOutcome::kMoved) {
          got += result.bytes;
          continue;
        }
        cut_off += result.outcome != platform::IoOutcome::kWouldBlock;
        break;
      }
      if (got > 65 + 252) return 2;
    }
    return cut_off >= 50 ? 0 : 3;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, (std::vector<int>{0, 0, 0}));
}

// As an ordinary user, with nothing but /tmp to write.
TEST(RestrictedHost, WorksForAnUnprivilegedUser) {
  const std::string folder = test::make_folder();
  std::filesystem::permissions(folder, std::filesystem::perms::all);
  const auto results = test::run_ranks(2, [&](Rank rank) {
    if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 60;
    Options options;
    options.timeout_ms = 20'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (!comm.is_ok()) {
      std::fprintf(stderr, "rank %d: %s\n", rank, comm.status().to_string().c_str());
      return 70;
    }
    Seen seen;
    const int status = exercise(*comm.value(), &seen);
    return status != 0 ? status : seen.transport == "shm" ? 0 : 3;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, kBothFine);
}

// Memory runs out: the tensor arena says so instead of faulting, and what was there goes on.
TEST(RestrictedHost, SharedMemoryThatIsShortIsAnErrorNotAFault) {
  Options options;
  options.timeout_ms = 20'000;
  const auto results = test::run_group(2, options, [](Communicator& comm) {
    auto too_much = comm.allocate_shared(std::uint64_t{1} << 50);
    if (too_much.is_ok() || too_much.status().code() != StatusCode::kSystem) return 1;
    auto memory = comm.allocate_shared(1 << 20);
    if (!memory.is_ok()) return 2;
    std::vector<float> data(2, 1.0f);
    return comm.run(all_reduce(data.data(), 2)).is_ok() ? 0 : 3;
  });
  EXPECT_EQ(results, kBothFine);
}

}  // namespace
}  // namespace pycomm
