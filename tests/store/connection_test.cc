// A name server that stays silent, and authorities that are not where OpenSSL looks for them.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "base/clock.h"
#include "store/connection.h"
#include "store/fake_clock.h"
#include "store/fake_redis.h"
#include "store/redis_server.h"

namespace {

constexpr std::string_view kSilentHost = "silent.invalid", kFailingHost = "failing.invalid";
std::mutex silence;
std::condition_variable spoken;
bool speaks = false;
std::atomic<int> lookups = 0, failures = 0;
std::atomic<bool> fails = false;

}  // namespace

// The library's calls come here: the program's own function goes before the system's.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** first) {
  static const auto system = reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (host == nullptr || (hints->ai_flags & AI_NUMERICHOST) != 0) return system(host, service, hints, first);
  if (host == kFailingHost && !fails) return system("127.0.0.1", service, hints, first);
  if (host == kFailingHost) {
    ++failures;
    return EAI_AGAIN;
  }
  if (host != kSilentHost) return system(host, service, hints, first);
  ++lookups;
  std::unique_lock lock(silence);
  spoken.wait(lock, [] { return speaks; });
  return system("127.0.0.1", service, hints, first);
}

namespace kvanta::store {
namespace {

TEST(Resolver, SilentNameServersHoldNothingUp) {
  FakeRedis fake;
  const FakeClock clock;
  const auto make = [&](double answer_seconds) {
    return MakeRedisServer({.url = fmt::format("redis://{}:{}", kSilentHost, fake.Port()),
                            .max_record_bytes = 100,
                            .now = clock,
                            .answer_seconds = answer_seconds});
  };
  const std::vector<RecordId> ids = {{.key = {}, .group = 0, .kind = cache::PageKind::kQuantized}};
  std::vector<uint8_t> found(1, 0);
  auto server = make(0.5);
  const double start = Now();
  EXPECT_EQ(server->Find(ids, found), "the name of the host was not resolved in time");
  EXPECT_GT(Now() - start, 0.4);
  EXPECT_EQ(server->Find(ids, found), "") << "a pause of a second";
  clock.Advance(1.05);
  std::thread speaker([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const std::lock_guard lock(silence);
    speaks = true;
    spoken.notify_all();
  });
  EXPECT_EQ(server->Find(ids, found), "");
  speaker.join();
  EXPECT_EQ(lookups, 1) << "the second attempt waits for the first one's lookup";
  CacheTierStats stats;
  server->Describe(stats);
  EXPECT_EQ(stats.connects, 1);

  speaks = false;
  server = make(0.05);
  server->Find(ids, found);
  server.reset();  // the end waits for no lookup: this one ends below
  const std::lock_guard lock(silence);
  speaks = true;
  spoken.notify_all();
}

int64_t Threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// A lookup that has failed since it was waited for says nothing of the next attempt.
TEST(Resolver, FailuresOfEarlierLookupsAreNotReported) {
  Resolver resolver;
  const int64_t threads = Threads();
  fails = true;
  EXPECT_THROW(resolver.Resolve(std::string(kFailingHost), 1, Now()), ConnectionError);
  while (failures == 0) std::this_thread::yield();
  while (Threads() > threads) std::this_thread::yield();  // until the lookup's has told
  fails = false;
  EXPECT_EQ(resolver.Resolve(std::string(kFailingHost), 1, Now() + 5)->ai_family, AF_INET);
}

TEST(Resolver, UnknownNamesAreTold) {
  Resolver resolver;
  try {
    resolver.Resolve("no such host", 1, Now() + 5);
    FAIL() << "it was resolved";
  } catch (const ConnectionError& error) {
    EXPECT_EQ(std::string(error.what()).find("the name of the host: "), 0u) << error.what();
  }
  const Addresses numeric = resolver.Resolve("::1", 6379, Now());
  EXPECT_EQ(numeric->ai_family, AF_INET6);
}

class AuthoritiesTest : public testing::Test {
 protected:
  AuthoritiesTest() {
    unsetenv("SSL_CERT_FILE");
    unsetenv("SSL_CERT_DIR");
    std::ofstream(authorities_) << "certificates";
  }
  ~AuthoritiesTest() override {
    unsetenv("SSL_CERT_FILE");
    unsetenv("SSL_CERT_DIR");
  }

  std::string FaultOf(const std::string& named, const AuthorityPlaces& places) const {
    try {
      return "found: " + FindAuthorities(named, places);
    } catch (const ConnectionError& error) {
      return error.what();
    }
  }

  const std::string folder_ = testing::TempDir();
  const std::string authorities_ = folder_ + "/authorities.pem";
  const std::string missing_ = folder_ + "/missing.pem";
};

TEST_F(AuthoritiesTest, FilesOfOtherDistributionsAreFound) {
  const AuthorityPlaces places = {.file = missing_, .folder = folder_, .distributions = {missing_, authorities_}};
  EXPECT_EQ(FindAuthorities({}, places), authorities_);
  EXPECT_EQ(FindAuthorities({}, {.file = authorities_, .folder = missing_, .distributions = {authorities_}}), "")
      << "OpenSSL's own";
  EXPECT_EQ(FindAuthorities({}, {.file = missing_, .folder = folder_, .distributions = {missing_}}), "")
      << "its folder";
  EXPECT_EQ(FindAuthorities(authorities_, {.file = authorities_}), authorities_) << "the URL's goes first";
}

TEST_F(AuthoritiesTest, TheEnvironmentGoesBeforeTheSystem) {
  const AuthorityPlaces places = {.file = missing_, .folder = missing_, .distributions = {authorities_}};
  setenv("SSL_CERT_DIR", "/a:/b", 1);
  EXPECT_EQ(FindAuthorities({}, places), "") << "OpenSSL reads it";
  setenv("SSL_CERT_FILE", authorities_.c_str(), 1);
  EXPECT_EQ(FindAuthorities({}, places), "");
  setenv("SSL_CERT_FILE", missing_.c_str(), 1);
  EXPECT_EQ(FaultOf({}, places), "TLS: SSL_CERT_FILE = '" + missing_ + "' cannot be read");
  EXPECT_EQ(FaultOf(authorities_, places), "found: " + authorities_);
}

TEST_F(AuthoritiesTest, MissingOnesAreNamed) {
  EXPECT_EQ(FaultOf(missing_, {.file = authorities_}), "TLS: ssl_ca_certs = '" + missing_ + "' cannot be read");
  EXPECT_EQ(FaultOf({}, {.file = "/a", .folder = "/b", .distributions = {"/c", "/d"}}),
            "TLS: no certificates of authorities: /c, /d, /a and /b are missing; install ca-certificates, set "
            "SSL_CERT_FILE or add ?ssl_ca_certs=FILE to the URL");
}

}  // namespace
}  // namespace kvanta::store
