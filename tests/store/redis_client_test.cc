// URLs of Redis servers, and that no message shows a password.
#include "store/redis_client.h"

#include <gtest/gtest.h>

#include "kvanta/error.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

TEST(RedisUrl, AllParts) {
  const RedisUrl url = ParseRedisUrl("rediss://an%40a:s%3Ae%2fcret@host.name:6380/12?ssl_ca_certs=%2Fca.pem");
  EXPECT_TRUE(url.tls);
  EXPECT_EQ(url.host, "host.name");
  EXPECT_EQ(url.port, 6380);
  EXPECT_EQ(url.database, 12);
  EXPECT_EQ(url.user, "an@a");
  EXPECT_EQ(url.password, "s:e/cret");
  EXPECT_EQ(url.ca_file, "/ca.pem");
}

TEST(RedisUrl, Defaults) {
  for (const char* text : {"redis://host", "redis://host/", "redis://host:6379", "redis://host:6379/0"}) {
    const RedisUrl url = ParseRedisUrl(text);
    EXPECT_FALSE(url.tls);
    EXPECT_EQ(url.host, "host");
    EXPECT_EQ(url.port, 6379);
    EXPECT_EQ(url.database, 0);
    EXPECT_EQ(url.user + url.password, "");
  }
  const RedisUrl url = ParseRedisUrl("redis://:secret@[::1]:7000/3");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, 7000);
  EXPECT_EQ(url.database, 3);
  EXPECT_EQ(url.user, "");
  EXPECT_EQ(url.password, "secret");
  EXPECT_EQ(ParseRedisUrl("redis://[fe80::2]").host, "fe80::2");
  EXPECT_EQ(ParseRedisUrl("redis://me@host").user, "me") << "its password is in the environment";
}

TEST(RedisUrl, WhatIsNoneIsRefusedWithoutItsText) {
  for (const char* text : {"secret",
                           "redis:secret",
                           "secret://host",
                           "redis://",
                           "redis://:secret@",

                           "redis://host:secret",
                           "redis://host:0",
                           "redis://host:65536",
                           "redis://host:6379x",
                           "redis://host:",
                           "redis://host/secret",
                           "redis://host/-1",

                           "redis://:%zz@host",
                           "redis://:sec%2@host",
                           "redis://[::1/0",
                           "redis://[::1]secret",
                           "redis://ho st",
                           "redis://host?ssl_ca_certs=secret",
                           "rediss://host?ssl_certfile=secret",
                           "rediss://host?timeout=secret",
                           "redis://:secret@:6379"}) {
    try {
      MakeRedisServer({.url = text});
      ADD_FAILURE() << text;
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_EQ(message.find("kv_store: "), 0u) << message;
      const bool names_scheme = std::string_view(text) == "secret://host";
      EXPECT_TRUE(names_scheme || message.find("secret") == message.npos) << message;
    }
  }
}

TEST(RedisUrl, Redacted) {
  EXPECT_EQ(RedactUrl("redis://user:pass@word@host:1/0"), "redis://***@host:1/0");
  EXPECT_EQ(RedactUrl("redis://host:1/0"), "redis://host:1/0");
  EXPECT_EQ(RedactUrl("pass@host"), "***@host");
}

}  // namespace
}  // namespace kvanta::store
